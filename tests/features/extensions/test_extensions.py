"""Parameters that are gathered as other tensors: FSDP2's all-gather extensions."""

import copy

import pytest
import torch
from support.extensions import Bf16Gathered, Int8Gathered, wrap
from support.models import (
    assert_same_gradients,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import Owned, Zero3Error, explain, fully_shard, record_collectives


def _bf16_linear(rows, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, rows), nn.Tanh(), nn.Linear(rows, 8)).to(dtype)


def _reads_bf16(how, rows, transport, reshard_after_forward):
    model = _bf16_linear(rows)
    for layer in (model[0], model[2]):
        layer.bias = None
    reference = copy.deepcopy(model)
    wrap(model, Bf16Gathered)
    for layer in (model[0], model[2]):
        fully_shard(layer, transport=transport, reshard_after_forward=reshard_after_forward)
    fully_shard(model, transport=transport)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert isinstance(model[0].weight.to_local(), Bf16Gathered)
    run = compiled(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for seed in range(3):
        batch = batch_of(4, 8, seed=seed).bfloat16()
        rounded = copy.deepcopy(reference).bfloat16()
        with record_collectives() as log:
            mean_square(run, mine(batch)).backward()
        mean_square(rounded, batch).backward()
        for parameter, whole in zip(reference.parameters(), rounded.parameters(), strict=True):
            parameter.grad = whole.grad.float()
        assert_same_gradients(model, reference, 2e-2)
        assert {c.dtype for c in log if c.op == "all_gather"} == {torch.bfloat16}
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()


@each_way
@either_transport
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.thin
def test_a_parameter_gathered_in_bf16(run_ranks, how, rows, transport, reshard_after_forward):
    run_ranks(2, _reads_bf16, how, rows, transport, reshard_after_forward, timeout=300)


def _reads_int8(how, transport):
    """Two payloads, and metadata with a tensor that changes from step to step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
    whole = [model[i].weight.detach().clone() for i in (0, 2)]
    wrap(model, Int8Gathered)
    fully_shard(model[0], transport=transport)
    fully_shard(model, transport=transport)
    run = compiled(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        Int8Gathered.factor = torch.tensor(1.0 + step)
        x = batch_of(4, 16, seed=step).requires_grad_()
        read = [_read_int8(weight) for weight in whole]
        values = {"0.weight": read[0], "2.weight": read[1]}
        values = {name: nn.Parameter(value) for name, value in values.items()}
        values |= {n: p.full_tensor() for n, p in model.named_parameters() if "bias" in n}
        plain = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
        expected = torch.func.functional_call(plain, values, (x,))
        actual = run(x)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        actual.square().mean().backward()
        expected.square().mean().backward()
        for weight, name in zip(whole, ("0.weight", "2.weight"), strict=True):
            grad = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(grad, values[name].grad, atol=1e-5, rtol=1e-5)
            weight.sub_(0.5 * grad)
        optimizer.step()
        optimizer.zero_grad()
    shards = [model.get_parameter(name).to_local().inner for name in ("0.weight", "2.weight")]
    for shard, weight in zip(shards, whole, strict=True):
        rows = weight.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
        torch.testing.assert_close(shard, rows, atol=1e-5, rtol=1e-5)


def _read_int8(weight):
    parts = []
    for rows in weight.chunk(torch.distributed.get_world_size()):
        scale = rows.abs().amax().clamp_min(1e-12) / 127
        parts.append((rows / scale).round() * scale * Int8Gathered.factor)
    return torch.cat(parts)


@each_way
@either_transport
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.thin
def test_two_payloads_and_changing_metadata(run_ranks, world_size, how, transport):
    run_ranks(world_size, _reads_int8, how, transport, timeout=300)


def _initializes_shards(how, cls, rows):
    Int8Gathered.factor = torch.ones(())  # another test may have changed it
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(*s, bias=False) for s in ((8, rows), (rows, 8))))
    wrap(model, cls)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(isinstance(parameter.to_local(), cls) for parameter in model.parameters())
    model.to_empty(device="cpu")
    reference = nn.Sequential(nn.Linear(8, rows, bias=False), nn.Linear(rows, 8, bias=False))
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(sharded.to_local(), cls)
        with torch.no_grad():
            sharded.to_local().inner.fill_(0.25)
            whole.fill_(0.25)
    dtype = torch.bfloat16 if cls is Bf16Gathered else torch.float32
    batch = batch_of(4, 8).to(dtype)
    with torch.no_grad():
        model(batch)  # eager code before any graph
    mean_square(compiled(model, how), mine(batch)).backward()
    mean_square(reference.to(dtype), batch).backward()
    assert_same_gradients(model, reference.float(), 2e-2)


@each_way
@pytest.mark.parametrize(("cls", "rows"), [(Bf16Gathered, 7), (Int8Gathered, 8)])
@pytest.mark.thin
def test_a_model_on_the_meta_device(run_ranks, how, cls, rows):
    run_ranks(2, _initializes_shards, how, cls, rows, timeout=300)


def test_other_subclasses_and_placements_are_refused(run_ranks):
    run_ranks(1, _refused)


def _refused():
    model = wrap(nn.Linear(8, 8), Bf16Gathered)
    with pytest.raises(NotImplementedError, match=r"Shard\(dim=1\).*'weight'.*dimension 0"):
        fully_shard(model, shard_placement_fn=lambda p: Shard(1 if p.ndim == 2 else 0))
    with pytest.raises(
        NotImplementedError, match=r"'weight' is a Bf16Gathered.*no rank can own it"
    ):
        fully_shard(model, shard_placement_fn=lambda p: Owned(0))
    model = wrap(nn.Linear(8, 8), _BadSignature)
    fully_shard(model)
    with pytest.raises(Zero3Error, match=r"fsdp_pre_all_gather of '.*weight' takes 2 arguments"):
        model(torch.ones(1, 8))


class _BadSignature(Bf16Gathered):
    def fsdp_pre_all_gather(self, mesh, size):
        raise AssertionError


def _changing_number():
    model = wrap(nn.Linear(8, 8), _Counting)
    fully_shard(model)
    run = compiled(model, "interpreted")
    with pytest.raises(Zero3Error, match="metadata that is not what graphs were compiled with"):
        run(torch.ones(1, 8))


class _Counting(Bf16Gathered):
    calls = 0

    def fsdp_pre_all_gather(self, mesh):
        type(self).calls += 1
        return (self.inner,), type(self).calls

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return outputs[0] * metadata, outputs


def test_metadata_that_graphs_cannot_follow_is_refused(run_ranks):
    run_ranks(1, _changing_number)


class _UsesItself(Bf16Gathered):
    """Reads attributes and methods of the shard when it is gathered, and has a state."""

    width = 8

    def __init__(self, inner, factor=2.0, state=None):
        super().__init__(inner)
        self.factor, self.state = factor, state

    def __tensor_flatten__(self):
        return ["inner"] if self.state is None else ["inner", "state"], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner, factor, size, stride):
        return cls(inner["inner"], factor, inner.get("state"))

    @property
    def twice(self):
        return 2 * self.factor

    def scaled(self, full):
        return full.float() * self.twice

    @classmethod
    def unscaled(cls, full):
        return full / cls.width

    @staticmethod
    def halved(full):
        return full / 2

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert self.shape[1] == self.size(1) == self.width
        assert (self.dtype, self.device.type) == (param_dtype, "cpu")
        assert self.ndim == self.dim() == self.ndimension() == 2
        assert self.numel() == self.nelement() == len(self) * self.width
        assert self.stride() == (self.width, 1) == (self.stride(0), self.stride(dim=-1))
        assert self.is_contiguous()
        assert self.layout == torch.strided
        assert self.nbytes == self.numel() * self.itemsize == self.numel() * self.element_size()
        assert self.is_floating_point()
        assert not self.is_complex()
        assert self.is_cpu
        assert not (self.is_cuda)
        assert not (self.is_meta)
        assert self.get_device() == -1
        full, _ = super().fsdp_post_all_gather(outputs, metadata, param_dtype)
        full = self.halved(self.unscaled(self.scaled(full)))
        return full * self.width, outputs


def _uses_itself(how):
    model = nn.Linear(8, 6, bias=False)
    whole = model.weight.detach().bfloat16().float()
    fully_shard(wrap(model, _UsesItself))
    run = compiled(model, how, fullgraph=how != "eager")
    x = torch.ones(2, 8)
    local = model.weight._local_tensor
    with torch._dynamo.config.patch(error_on_recompile=True):
        for state in (None, torch.ones(3), torch.ones(())):  # of no account to a graph
            local.state = state
            torch.testing.assert_close(run(x), 2 * x @ whole.T)
    local.factor = 4.0
    torch.testing.assert_close(run(x), 4 * x @ whole.T)


@each_way
def test_graphs_take_the_attributes_of_a_shard_and_not_the_shard(run_ranks, how):
    run_ranks(2, _uses_itself, how)


def _under_no_grad():
    """A weight that a compiled forward reads under no_grad alone is that of this step."""
    Int8Gathered.factor = torch.ones(())
    frozen = wrap(nn.Linear(16, 16, bias=False), Int8Gathered)
    model = _ReadsUnderNoGrad(frozen, nn.Linear(16, 16))
    fully_shard(model.inner)
    fully_shard(model)
    run = compiled(model, "interpreted")
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.inner.weight.to_local().inner.fill_(value)
        actual = run(torch.ones(2, 16)) - model.outer.bias.full_tensor()
        torch.testing.assert_close(actual, torch.full((2, 16), 16 * value))


class _ReadsUnderNoGrad(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.inner, self.outer = inner, outer

    def forward(self, x):
        with torch.no_grad():
            x = self.inner(x)
        return x + self.outer(torch.zeros_like(x))


def test_a_weight_read_under_no_grad_is_of_this_step(run_ranks):
    run_ranks(2, _under_no_grad)


def _stock(backend, checkpointed):
    """Other backends of torch.compile, and checkpoints in eager code."""
    Int8Gathered.factor = torch.ones(())
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    whole = model.weight.detach().clone()
    wrap(model, Int8Gathered)
    fully_shard(model)
    x = batch_of(4, 16)
    reference = nn.Parameter(_read_int8(whole))
    expected = nn.functional.linear(x, reference)
    expected.square().mean().backward()
    run = torch.compile(model, backend=backend)
    with torch.no_grad():  # another step, before this one
        model.weight.to_local().inner.mul_(3)
        run(x)
        model.weight.to_local().inner.div_(3)
    output = checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
    torch.testing.assert_close(output - model.bias.full_tensor(), expected)
    (output - model.bias.full_tensor().detach()).square().mean().backward()
    grad = model.weight.grad.full_tensor()
    torch.testing.assert_close(grad, reference.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("backend", "checkpointed"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=pytest.mark.inductor),
    ],
)
def test_another_backend(run_ranks, backend, checkpointed):
    run_ranks(2, _stock, backend, checkpointed, timeout=300)


def _methods_after_fully_shard(how):
    model = _bf16_linear(8)
    fully_shard(model)
    run = compiled(model, how)
    local = model.get_parameter("2.weight")._local_tensor
    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        setattr(local, name, getattr(Bf16Gathered, name))
    with pytest.raises(Zero3Error, match=r"'2\.weight', a Tensor, says what to gather"):
        run(batch_of(4, 8))


@each_way
def test_methods_that_come_after_fully_shard_are_refused(run_ranks, how):
    run_ranks(2, _methods_after_fully_shard, how)


def _reported():
    Int8Gathered.factor = torch.ones(())
    model = wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), Int8Gathered)
    fully_shard(model, transport="c10d")
    report = explain(model, torch.ones(2, 64))
    assert not report.in_eager
    assert report.shards == sum(4 * p.numel() for p in model.parameters())
    return report.gathered


def test_explain_knows_payloads(run_ranks):
    codes_and_scales, biases = 2 * (64 * 64 + 4), 2 * 4 * 64
    assert run_ranks(1, _reported) == [codes_and_scales + biases]  # which forward keeps
