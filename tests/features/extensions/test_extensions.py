"""Parameters that are gathered as other tensors: FSDP2's all-gather extensions."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import (
    Owned,
    Zero3Error,
    capture_graphs,
    explain,
    fully_shard,
    record_collectives,
)


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


class Lora(nn.Module):
    """A frozen matrix of four bits, and an adapter of two small ones."""

    def __init__(self, to_nf4, linear, width):
        super().__init__()
        weight = to_nf4(torch.randn(width, width) / width**0.5, scaler_block_size=4)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, width) / 10)
        self.up = nn.Parameter(torch.randn(width, 4) / 10)
        self._linear = linear

    def forward(self, x):
        return torch.tanh(self._linear(x, self.weight) + x @ self.down.T @ self.up.T)


def _qlora(how, transport):
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    torch.manual_seed(0)
    model = nn.Sequential(*(Lora(nf4.to_nf4, nf4.linear_nf4, 128) for _ in range(3)))
    reference = nn.Sequential(*(Lora(nf4.to_nf4, nf4.linear_nf4, 128) for _ in range(3)))
    for mine_, whole in zip(model, reference, strict=True):  # NF4Tensor.clone() would round again
        whole.weight = nn.Parameter(mine_.weight.detach(), requires_grad=False)
        whole.down.data.copy_(mine_.down)
        whole.up.data.copy_(mine_.up)
    payloads = sum(
        t.nbytes
        for layer in reference
        for t in (
            layer.weight.quantized_scalers,
            layer.weight.quantization_factor,
            layer.weight.quantized_data,
        )
    )
    for block in model:
        fully_shard(block, transport=transport)
    fully_shard(model, transport=transport)
    at_rest = sum(
        getattr(layer.weight.to_local(), name).untyped_storage().nbytes()
        for layer in model
        for name in ("quantized_scalers", "quantization_factor", "quantized_data")
    )
    assert at_rest == payloads // torch.distributed.get_world_size()
    run = compiled(model, how, fullgraph=how != "eager")
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)
        for m in (model, reference)
    ]
    for seed in range(3):
        batch = batch_of(8, 128, seed=seed)
        with record_collectives() as log:
            mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        for (name, parameter), whole in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            if "weight" in name:
                assert parameter.grad is None
            else:
                difference = parameter.grad.full_tensor() - whole.grad
                assert difference.norm() <= (1e-5 if seed else 1e-6) * whole.grad.norm(), name
        gathered = [c for c in log if c.op == "all_gather" and c.dtype == torch.uint8]
        assert sum(c.nbytes for c in gathered) == 2 * 3 * 128 * 128 // 2  # forward and backward
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@each_way
@either_transport
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.thin
def test_adapters_on_torchaos_nf4(run_ranks, world_size, how, transport):
    run_ranks(world_size, _qlora, how, transport, timeout=300)


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


def _saved(how):
    """No forward saves a weight in its compute dtype: backward computes it again."""
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    model = nn.Sequential(*(Lora(nf4.to_nf4, nf4.linear_nf4, 128) for _ in range(3)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    for layer in model:
        assert not any(
            isinstance(v, torch.Tensor) for v in vars(layer._parameters["weight"]).values()
        )
    with capture_graphs() as graphs:
        compiled(model, how, fullgraph=True)(batch_of(2, 128)).sum().backward()
    [forward] = graphs.forward
    outputs = forward.graph_module.graph.output_node().all_input_nodes
    return [tuple(node.meta["val"].shape) for node in outputs]


def test_no_forward_saves_a_whole_weight(run_ranks):
    for shapes in run_ranks(1, _saved, "interpreted"):
        assert (128, 128) not in shapes


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


def _replicas():
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    torch.manual_seed(0)
    model = Lora(nf4.to_nf4, nf4.linear_nf4, 128)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    with pytest.raises(ValueError, match=r"'weight' is a NF4Tensor.*pass mesh_dim_names"):
        fully_shard(model, mesh=mesh)
    names = ("replicate", "shard")
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    fully_shard(model, mesh=mesh)
    run = compiled(model, "interpreted")
    for _ in range(2):
        mean_square(run, batch_of(4, 128)).backward()
    assert model.up.grad.full_tensor().isfinite().all()


def test_replicas_of_nf4(run_ranks):
    run_ranks(4, _replicas)


def _lora(nf4, seed):
    torch.manual_seed(0)
    model = nn.Sequential(*(Lora(nf4.to_nf4, nf4.linear_nf4, 128) for _ in range(2)))
    generator = torch.Generator().manual_seed(seed)
    for layer in model:
        layer.down.data.normal_(0, 0.1, generator=generator)
        layer.up.data.normal_(0, 0.1, generator=generator)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(adapters, lr=1e-2, foreach=False)


def _trained_lora(seed, steps, folder, action):
    """Trains adapters for some steps, after loading a checkpoint or before saving one."""
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    model, optimizer = _lora(nf4, seed)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    if action == "load":
        state = get_state_dict(model, optimizer, options=options)
        dcp.load({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options
        )
    run = compiled(model, "interpreted")
    for step in steps:
        mean_square(run, mine(batch_of(8, 128, seed=step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    if action == "save":
        state = get_state_dict(model, optimizer, options=options)
        assert all("weight" not in name for name in state[0])
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
    return {n: p.full_tensor().detach() for n, p in model.named_parameters() if p.requires_grad}


def test_adapters_are_saved_and_resumed_on_more_ranks(run_ranks, tmp_path):
    run_ranks(2, _trained_lora, 1, range(3), str(tmp_path), "save")
    resumed = run_ranks(4, _trained_lora, 2, range(3, 6), str(tmp_path), "load")
    whole = run_ranks(2, _trained_lora, 1, range(6), str(tmp_path), "")
    for name, value in whole[0].items():
        torch.testing.assert_close(resumed[0][name], value, atol=1e-4, rtol=1e-4)


def _float8(how):
    """torchao's float8 training: weights travel in fp8, with one scale for all ranks."""
    float8 = pytest.importorskip("torchao.float8")

    def build(**settings):
        torch.manual_seed(0)
        layers = nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 64, bias=False)
        model = nn.Sequential(*layers).bfloat16()
        config = float8.Float8LinearConfig(emulate=True, **settings)
        return float8.convert_to_float8_training(model, config=config)

    model, reference = build(enable_fsdp_float8_all_gather=True), build()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    run = compiled(model, how)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for seed in range(3):
        batch = batch_of(16, 64, seed=seed).bfloat16()
        with record_collectives() as log:
            mean_square(run, mine(batch).clone()).backward()
        losses = [mean_square(reference, each.clone()) for each in batch.chunk(2)]
        (sum(losses) / 2).backward()
        assert {c.dtype for c in log if c.op == "all_gather"} == {torch.float8_e4m3fn}
        assert_same_gradients(model, reference, 2e-2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@each_way
def test_torchaos_float8_training(run_ranks, how):
    run_ranks(2, _float8, how, timeout=300)
