"""Non-finite gradients are named on every rank; norms are norms of full gradients."""

import math

import pytest
import torch
import torch.distributed as dist
from support.mesh_models import data_and_tensor_parallel, sharded_by, tensor_parallel
from support.models import (
    Stack,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    shard,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from deepcompile_zero3 import (
    Zero3Error,
    defer_reduction,
    deposit_grad,
    detect_nonfinite,
    fully_shard,
    gradient_norms,
)


def _nan_in_one(rank, how, transport, mesh_shape):
    """Returns each rank's error for a NaN in one rank's input; checks the step after it."""
    mesh = init_device_mesh("cpu", mesh_shape)
    model, reference = shard(Stack(), transport=transport, mesh=mesh)
    run = compiled(model, how)
    batch = batch_of(8, 8)
    assert_same_step(model, reference, batch, run=run)
    model.zero_grad()
    reference.zero_grad()
    mine_of = mine(batch).clone()
    if dist.get_rank() == rank:
        mine_of[0, 0] = torch.nan
    with detect_nonfinite(model), pytest.raises(Zero3Error) as raised:
        mean_square(run, mine_of).backward()
    assert all(p.grad is None for p in model.parameters())
    with detect_nonfinite(model):
        assert_same_step(model, reference, batch, run=run)
    return str(raised.value)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@each_way
def test_a_nan_is_traced_to_its_rank(run_ranks, how, transport):
    for told in run_ranks(2, _nan_in_one, 1, how, transport, (2,)):
        assert told.startswith("gradients are not finite. rank 1: the gradient of '"), told
        assert "before it was reduced, has " in told.split(";")[0]
        assert told.endswith(
            "; the gradients of this backward were dropped: skip the batch, or "
            "lower the learning rate or the loss scale. See docs/debugging.md#a-nan"
        )
        assert "rank 0: the gradient of '" not in told.split("once it was reduced")[0]


class _PoisonedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


def _nan_in_a_block():
    stack = Stack(depth=4)
    model, _ = shard(stack, blocks=stack.blocks)
    if dist.get_rank() == 1:
        model.blocks[2].register_forward_hook(lambda *call: _PoisonedBackward.apply(call[-1]))
    with detect_nonfinite(model), pytest.raises(Zero3Error) as raised:
        mean_square(model, mine(batch_of(8, 8))).backward()
    return str(raised.value)


def test_the_gradient_next_to_a_nan_is_named_first(run_ranks):
    for told in run_ranks(2, _nan_in_a_block):
        first = told.removeprefix("gradients are not finite. ").split(";")[0]
        assert first.startswith("rank 1: the gradient of 'blocks.2."), told


def test_a_nan_of_a_replica_is_reported_to_the_others(run_ranks):
    for told in run_ranks(4, _nan_in_one, 2, "eager", "auto", (2, 2)):
        assert "rank 2: the gradient of '" in told, told


def _deposits():
    model, _ = shard(Stack())
    with detect_nonfinite(model):
        with defer_reduction(model):
            deposit_grad(model.head.bias, torch.ones(8))
        bad = torch.ones(8)
        bad[1], bad[2], bad[3] = torch.inf, -torch.inf, torch.nan
        with pytest.raises(Zero3Error) as raised, defer_reduction(model):
            deposit_grad(model.head.bias, bad)
    assert model.head.bias.grad.full_tensor().tolist() == [1.0] * 8
    return str(raised.value)


def test_a_deposit_is_looked_at_too(run_ranks):
    for told in run_ranks(2, _deposits):
        for rank in (0, 1):
            found = "before it was reduced, has 1 NaN and 2 infinite of 8 elements"
            assert f"rank {rank}: the gradient of 'head.bias', {found}" in told


def _deposit_on_a_small_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("small", "other"))
    model = Stack()
    fully_shard(model.head, mesh=mesh["small"])
    fully_shard(model)
    grad = torch.full([8], torch.nan if dist.get_rank() == 0 else 1.0)

    def deposit():
        with detect_nonfinite(model), defer_reduction(model):
            deposit_grad(model.head.bias, grad)
            deposit_grad(model.blocks[0].down.bias, torch.ones(8))

    with pytest.raises(Zero3Error) as raised:
        deposit()
    return str(raised.value)


def test_a_nan_on_a_small_mesh_is_reported_on_a_larger_one(run_ranks):
    for told in run_ranks(4, _deposit_on_a_small_mesh):
        assert "rank 0: the gradient of 'head.bias', before it was reduced, has 8 NaN" in told


def test_an_unsharded_model_cannot_be_looked_at():
    with (
        pytest.raises(Zero3Error, match="no parameter of the Linear is sharded"),
        detect_nonfinite(torch.nn.Linear(2, 2)),
    ):
        pass


def _norms(how):
    model, reference = shard(Stack())
    run = compiled(model, how)
    assert gradient_norms(model) == {}
    assert_same_step(model, reference, batch_of(4, 8), run=run)
    for norm_type in (2.0, 1.0, float("inf")):
        expected = {
            name: torch.linalg.vector_norm(p.grad, norm_type).item()
            for name, p in reference.named_parameters()
        }
        assert gradient_norms(model, norm_type) == pytest.approx(expected, rel=1e-5)


def test_norms_are_those_of_one_process(run_ranks):
    run_ranks(2, _norms, "eager")


def _norms_of_one_row():
    model, reference = shard(nn.Linear(8, 1))
    assert_same_step(model, reference, batch_of(4, 8))
    for norm_type in (0, 1, -1, math.inf, -math.inf):
        expected = {
            name: torch.linalg.vector_norm(p.grad, norm_type).item()
            for name, p in reference.named_parameters()
        }
        assert gradient_norms(model, norm_type) == pytest.approx(expected, rel=1e-5)


def test_a_rank_without_rows_takes_part_in_norms_of_any_order(run_ranks):
    run_ranks(2, _norms_of_one_row, timeout=30)


def _nan_in_a_part():
    """A NaN of a gradient that is on one rank of tensor parallelism, and on no mesh of all."""
    mesh = data_and_tensor_parallel()
    model = sharded_by(fully_shard, tensor_parallel(Stack(), mesh["tp"]), mesh=mesh["dp"])
    up = model.blocks[0].up.weight
    whole = torch.ones(up.shape)
    whole[-1] = torch.nan  # a row of the last rank of a column-wise layer
    parts = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    with detect_nonfinite(model), pytest.raises(Zero3Error) as raised, defer_reduction(model):
        deposit_grad(up, parts)
    assert up.grad is None
    return str(raised.value)


def test_a_nan_of_one_rank_of_tensor_parallelism_is_told_to_the_others(run_ranks):
    for told in run_ranks(4, _nan_in_a_part):
        assert "the gradient of 'blocks.0.up.weight', before it was reduced, has 8 NaN" in told
