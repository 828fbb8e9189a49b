"""Parameters and gradients have the requested dtypes at every stage."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.models import (
    Stack,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    relative_difference,
    shard,
)
from torch import nn

from deepcompile_zero3 import MixedPrecisionPolicy, fully_shard, record_collectives


def _on_the_wire(log, op):
    return {collective.dtype for collective in log if collective.op == op}


def _mixed_precision(how):
    """Returns dtypes by place, for compute in bf16 on fp32 shards."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = Stack()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32))
    run = compiled(model, how)
    batch = batch_of(4, 8)
    with record_collectives() as log:
        output = run(mine(batch))
        output.square().mean().backward()

    # One process that rounds weights and gradients where ranks do.
    world_size = dist.get_world_size()
    for rows in batch.chunk(world_size):
        rounded = copy.deepcopy(reference).bfloat16()
        rounded(rows.bfloat16()).float().square().mean().backward()
        for whole, parameter in zip(reference.parameters(), rounded.parameters(), strict=True):
            grad = parameter.grad.float() / world_size
            whole.grad = grad if whole.grad is None else whole.grad + grad
    tolerance = 1e-2 if how == "zero3" else 1e-6  # Inductor keeps more precision inside a kernel
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert relative_difference(parameter.grad.full_tensor(), whole.grad) <= tolerance
    return {
        "all_gather": _on_the_wire(log, "all_gather"),
        "reduce_scatter": _on_the_wire(log, "reduce_scatter"),
        "output": {output.dtype},
        "parameter": {parameter.dtype for parameter in model.parameters()},
        "grad": {parameter.grad.dtype for parameter in model.parameters()},
    }


@each_way
def test_mixed_precision_computes_low_and_reduces_high(run_ranks, how):
    dtypes = {
        "all_gather": {torch.bfloat16},
        "reduce_scatter": {torch.float32},
        "output": {torch.float32},
        "parameter": {torch.float32},
        "grad": {torch.float32},
    }
    assert run_ranks(2, _mixed_precision, how) == [dtypes] * 2


class _UsedTwice(nn.Module):
    """A model whose weight gets two gradients in bf16; their sum differs between fp32 and bf16."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(batch_of(16, 16).bfloat16())

    def forward(self, x):
        return torch.cat([x @ self.weight, (3 * x) @ self.weight])


def _float_gradients(how):
    model = _UsedTwice()
    model.weight.grad_dtype = torch.float32
    model, reference = shard(model)
    reference.weight.grad_dtype = torch.float32  # a deep copy drops it
    run = compiled(model, how)
    batch = batch_of(8, 16, seed=1).bfloat16()
    for step in range(1, 3):
        with record_collectives() as log:
            mean_square(run, mine(batch)).backward()
        for rows in batch.chunk(dist.get_world_size()):
            mean_square(reference, rows).backward()
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.grad.dtype == torch.float32
        assert _on_the_wire(log, "all_gather") == {torch.bfloat16}
        assert _on_the_wire(log, "reduce_scatter") == {torch.float32}
        expected = reference.weight.grad / dist.get_world_size()
        assert torch.equal(model.weight.grad.full_tensor(), expected), f"step {step}"
        assert not torch.equal(expected.bfloat16().float(), expected)


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["zero3", "interpreted", "inductor", "eager"])
def test_float_gradients_of_a_bfloat16_weight_are_never_rounded(run_ranks, how):
    run_ranks(2, _float_gradients, how)


def _gradients_of_two_dtypes(how):
    """Trains a head with its own contract and a block with the default contract."""
    model = Stack(depth=1).bfloat16()
    for parameter in model.head.parameters():
        parameter.grad_dtype = torch.float32
    model, _ = shard(model)
    run = compiled(model, how)
    with record_collectives() as log:
        mean_square(run, batch_of(2, 8).bfloat16()).backward()
    assert _on_the_wire(log, "reduce_scatter") == {torch.bfloat16, torch.float32}
    for fqn, parameter in model.named_parameters():
        expected = torch.float32 if fqn.startswith("head.") else torch.bfloat16
        assert parameter.grad.dtype == expected, fqn


@each_way
def test_gradients_of_two_dtypes_share_a_backward(run_ranks, how):
    run_ranks(2, _gradients_of_two_dtypes, how)


class _Compressed(torch.autograd.Function):
    """A function whose weight gradient is computed in a dtype that no gradient is kept in."""

    @staticmethod
    def forward(ctx, x, weight, dtype):
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, (grad.t() @ x).to(ctx.dtype).to(weight.dtype), None


class _Compressing(nn.Linear):
    dtype = torch.int8

    def forward(self, x):
        return _Compressed.apply(x, self.weight, self.dtype)


@pytest.mark.usefixtures("one_rank")
@each_way
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_a_gradient_that_was_cast_from_another_dtype_keeps_the_cast(dtype, how):
    model = _Compressing(8, 8, bias=False)
    model.dtype = dtype
    reference = copy.deepcopy(model)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    x = batch_of(4, 8).mul(3).round()
    compiled(model, how)(x).sum().backward()
    reference(x).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), reference.weight.grad)
