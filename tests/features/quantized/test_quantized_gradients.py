"""Gradients that travel as codes of one byte and scales: ``quantize_gradients``."""

import itertools

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Stack,
    assert_same_parameters,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from support.quantization import FORMATS, bits, difficult, rounded
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import (
    Owned,
    Zero3Error,
    explain,
    fully_shard,
    quantize_gradients,
    record_collectives,
)

each_format = pytest.mark.parametrize("dtype", list(FORMATS), ids=str)


class Given(nn.Module):
    """A model whose gradients are given: its loss is the sum of the products with them."""

    def __init__(self):
        super().__init__()
        self.even = nn.Parameter(torch.zeros(8, 24))
        self.uneven = nn.Parameter(torch.zeros(7, 4, 6))
        self.large = nn.Parameter(torch.zeros(260, 512))
        self.bias = nn.Parameter(torch.zeros(24))

    def forward(self, grads):
        return sum((getattr(self, name) * grad).sum() for name, grad in grads.items())


def _gradients(rank, plain=False):
    shapes = {"even": (8, 24), "uneven": (7, 4, 6), "large": (260, 512), "bias": (24, 1)}
    draw = (lambda *shape, seed: batch_of(*shape, seed=seed)) if plain else difficult
    grads = {n: draw(*shape, seed=10 * rank + i) for i, (n, shape) in enumerate(shapes.items())}
    return grads | {"bias": grads["bias"].view(24)}


def _block(tensor):
    row = tensor[0].numel()
    return 128 if row % 128 == 0 else row


def _sum(name, dtype, world_size, plain):
    addends = [_gradients(rank, plain)[name] for rank in range(world_size)]
    if name != "bias":
        addends = [rounded(addend, dtype, _block(addend)) for addend in addends]
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total / world_size


def _reduced(how, dtype, plain=False, placement=None):
    model = Given()
    fully_shard(model, transport="c10d", shard_placement_fn=placement)
    quantize_gradients(model, dtype)
    run = compiled(model, how)
    grads = _gradients(dist.get_rank(), plain)
    with record_collectives() as log:
        run(grads).backward()
    results = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return results, [(c.dtype, c.nbytes) for c in log if c.op == "reduce_scatter"]


@each_way
@each_format
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.thin
def test_gradients_are_sums_of_rounded_addends_bit_for_bit(run_ranks, world_size, how, dtype):
    for results, _ in run_ranks(world_size, _reduced, how, dtype):
        for name, actual in results.items():
            assert torch.equal(bits(actual), bits(_sum(name, dtype, world_size, False))), name


@each_format
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.more)])
@pytest.mark.thin
def test_bytes_on_the_wire(run_ranks, world_size, dtype):
    for _, log in run_ranks(world_size, _reduced, "eager", dtype):
        sent = sum(nbytes for dtype, nbytes in log if dtype == torch.uint8)
        rows = [-(-n // world_size) * world_size for n in (8, 7, 260)]
        assert sent == rows[0] * 28 + rows[1] * 28 + rows[2] * (512 + 16)
        assert 260 * (512 + 16) < 0.27 * 260 * 512 * 4


@each_format
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.thin
def test_collectives_as_of_nccl(run_collectives, world_size, dtype):
    for results, _ in run_collectives(world_size, _reduced, "interpreted", dtype, True):
        for name, actual in results.items():
            expected = _sum(name, dtype, world_size, True)
            if name == "bias":  # the backend sums
                torch.testing.assert_close(actual, expected)
            else:
                assert torch.equal(actual, expected), name


def _of_owner(parameter):
    return Owned(1) if parameter.shape == (260, 512) else None


def _owned(dtype):
    model = Given()
    fully_shard(model, transport="c10d", shard_placement_fn=_of_owner)
    quantize_gradients(model, dtype)
    model(_gradients(dist.get_rank(), True)).backward()
    grad = model.large.grad
    return grad.to_local() if dist.get_rank() == 1 else None


@pytest.mark.parametrize("collectives", [False, True])
def test_an_owner_gets_all_rows(run_ranks, run_collectives, collectives):
    run = run_collectives if collectives else run_ranks
    _, actual = run(2, _owned, torch.int8)
    assert torch.equal(actual, _sum("large", torch.int8, 2, True))


class _Product(nn.Linear):
    def forward(self, grad):
        return (self.weight * grad).sum()


def _contract(how):
    """A leaf's contract holds ahead of the codes, and ``.grad`` keeps its dtype behind them."""
    model = _Product(24, 8, bias=False)
    model.weight.grad_dtype = torch.bfloat16
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(model, transport="c10d", mp_policy=policy)
    quantize_gradients(model, torch.float8_e4m3fn)
    raw = [batch_of(8, 24, seed=rank) for rank in range(2)]
    compiled(model, how)(raw[dist.get_rank()]).backward()
    addends = [rounded(each.bfloat16().float(), torch.float8_e4m3fn, 24) for each in raw]
    others = [rounded(each, torch.float8_e4m3fn, 24) for each in raw]
    assert not torch.equal(addends[0], others[0])
    assert model.weight.grad.dtype is torch.bfloat16
    expected = ((addends[0] + addends[1]) / 2).bfloat16()
    assert torch.equal(model.weight.grad.full_tensor(), expected)


@each_way
def test_the_contract_comes_first(run_ranks, how):
    run_ranks(2, _contract, how)


def test_error_feedback_makes_up_for_rounding(run_ranks):
    for without, fed_back in zip(
        run_ranks(2, _fed_back, False), run_ranks(2, _fed_back, True), strict=True
    ):
        assert torch.equal(without, torch.zeros(4, 7))
        torch.testing.assert_close(fed_back, torch.full((4, 7), 0.3), atol=0.03, rtol=0)


def _fed_back(feedback):
    model = _Product(8, 4, bias=False)
    fully_shard(model, transport="c10d")
    quantize_gradients(model, torch.int8, error_feedback=feedback)
    total = torch.zeros(4, 8)
    grad = torch.full((4, 8), 0.3)
    grad[:, 0] = 127.0  # codes are integers
    for _ in range(40):
        model(grad).backward()
        total += model.weight.grad.full_tensor()
        model.zero_grad()
    return total[:, 1:] / 40


def _fed_back_after(trouble):
    """A gradient that is not finite, or a backward that raises, leaves nothing behind."""
    model = _Product(8, 4, bias=False)
    fully_shard(model, transport="c10d")
    quantize_gradients(model, torch.int8, error_feedback=True)
    grad = torch.full((4, 8), 0.3)
    grad[:, 0] = 127.0
    if trouble == "infinity":
        model(torch.where(torch.arange(8) == 3, torch.inf, grad)).backward()
        assert model.weight.grad.full_tensor()[:, 3].isnan().all()
        model.zero_grad()
    else:
        value = model(grad)
        value.register_hook(lambda _: _raise())
        with pytest.raises(KeyError):
            (value + model(grad)).backward()
    model(grad).backward()
    return model.weight.grad.full_tensor()


def _raise():
    raise KeyError


@pytest.mark.parametrize("trouble", ["infinity", "raises"])
def test_error_feedback_after_trouble(run_ranks, trouble):
    for actual in run_ranks(2, _fed_back_after, trouble):
        assert actual.isfinite().all()
        assert torch.equal(actual[:, 0], torch.full((4,), 127.0))
        if trouble == "raises":
            assert not actual[:, 1:].any()  # as in a first backward


class _OneOf(nn.Module):
    """Two matrices whose chunks travel alone in fp32, and share a message as codes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(256, 256))
        self.second = nn.Parameter(torch.zeros(256, 256))

    def forward(self, grads):
        return sum((getattr(self, name) * grad).sum() for name, grad in grads.items())


def _first_is_missing():
    model = _OneOf()
    fully_shard(model, transport="c10d").set_reduce_scatter_unused_params(True)  # as NCCL asks for
    quantize_gradients(model, torch.int8)
    grads = {name: batch_of(256, 256, seed=i) for i, name in enumerate(("first", "second"))}
    if dist.get_rank() == 1:
        del grads["second"]
    model(grads).backward()
    return model.second.grad.full_tensor()


def test_the_first_gradient_may_be_missing_on_a_rank(run_ranks):
    expected = rounded(batch_of(256, 256, seed=1), torch.int8, 128) / 2
    for actual in run_ranks(2, _first_is_missing):
        assert torch.equal(actual, expected)


def _micro_batches(how):
    """Sums over micro-batches are rounded once, and replicas are summed in full."""
    model = Given()
    fully_shard(model, transport="c10d")
    quantize_gradients(model, torch.float8_e5m2)
    run = compiled(model, how)
    first, second = (_gradients(dist.get_rank() + 2 * i, True) for i in range(2))
    model.set_requires_gradient_sync(False)
    run(first).backward()
    with pytest.raises(Zero3Error, match="gradients of 'even' wait for their reduction"):
        quantize_gradients(model, None)
    model.set_requires_gradient_sync(True)
    run(second).backward()
    for name in ("even", "uneven", "large"):
        addends = []
        for rank in range(2):
            value = _gradients(rank, True)[name] + _gradients(rank + 2, True)[name]
            addends.append(rounded(value, torch.float8_e5m2, _block(value)))
        actual = model.get_parameter(name).grad.full_tensor()
        assert torch.equal(actual, (addends[0] + addends[1]) / 2), name


@each_way
def test_micro_batches_are_rounded_once(run_ranks, how):
    run_ranks(2, _micro_batches, how)


def _replicas():
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Given()
    fully_shard(model, mesh=mesh, transport="c10d")
    quantize_gradients(model, torch.int8)
    model(_gradients(dist.get_rank(), True)).backward()
    return model.large.grad.full_tensor()


def test_replicas_sum_in_full(run_ranks):
    addends = [rounded(_gradients(rank, True)["large"], torch.int8, 128) for rank in range(4)]
    expected = ((addends[0] + addends[1]) + (addends[2] + addends[3])) / 4
    for actual in run_ranks(4, _replicas):
        torch.testing.assert_close(actual, expected)


def _trained(dtype, how):
    torch.manual_seed(0)
    model = Stack(width=16)
    model, reference = shard(model, model.blocks, transport="c10d")
    quantize_gradients(model, dtype)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(5):
        batch = batch_of(8, 16, seed=seed)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, 2e-2)
    quantize_gradients(model, None)
    with record_collectives() as log:
        mean_square(run, mine(batch)).backward()
    assert {c.dtype for c in log} == {torch.float32}
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


@each_way
def test_training_goes_on_and_ends(run_ranks, how):
    run_ranks(2, _trained, torch.int8, how, timeout=300)


def _missing():
    """A gradient that only one rank has: the other sends zeros."""
    model = Given()
    fully_shard(model, transport="c10d").set_reduce_scatter_unused_params(True)  # as NCCL asks for
    quantize_gradients(model, torch.int8)
    grads = _gradients(0, True)
    if dist.get_rank() == 1:
        del grads["large"]
    model(grads).backward()
    return model.large.grad.full_tensor()


def test_a_gradient_that_a_rank_lacks_is_zero_there(run_ranks):
    expected = rounded(_gradients(0, True)["large"], torch.int8, 128) / 2
    for actual in run_ranks(2, _missing):
        assert torch.equal(actual, expected)


def _explained():
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512))
    fully_shard(model, transport="c10d")
    quantize_gradients(model, torch.int8)
    report = explain(model, torch.ones(2, 512))
    gradients = list(itertools.chain(*(graph.gradients for graph in report.graphs)))
    return {g.parameter: (g.wire, g.nbytes) for g in gradients}, str(report)


def test_explain_tells_formats_and_bytes(run_ranks):
    for gradients, text in run_ranks(2, _explained):
        assert gradients["0.weight"] == ("int8/128", 512 * (512 + 16))
        assert gradients["0.bias"] == ("f32", 4 * 512)
        assert "f32 -> f32 -> int8/128" in text


def _bad():
    model, _ = shard(nn.Linear(12, 4), transport="shared_memory")
    for arguments, message in [
        ((torch.int16,), "dtype must be one of torch.float8_e4m3fn"),
        ((torch.int8, {"block": 0}), "block must be an int of at least 1, got 0"),
        ((torch.int8, {"error_feedback": 1}), "error_feedback must be a bool, got 1"),
    ]:
        settings = arguments[1] if len(arguments) > 1 else {}
        with pytest.raises(ValueError, match=message):
            quantize_gradients(model, arguments[0], **settings)
    with pytest.raises(
        Zero3Error, match=r"'weight' share the memory of one host.*transport='c10d'"
    ):
        quantize_gradients(model, torch.int8)
    model, _ = shard(nn.Linear(12, 4), transport="c10d")
    with pytest.raises(
        Zero3Error, match=r"block is 5, which does not divide a row of '.*weight' \[4"
    ):
        quantize_gradients(model, torch.int8, block=5)
    with pytest.raises(Zero3Error, match="no parameter of the Linear is sharded"):
        quantize_gradients(nn.Linear(1, 1), torch.int8)


@pytest.mark.gloo  # shared memory is among the arguments
def test_bad_arguments_are_named(run_ranks):
    run_ranks(2, _bad)
