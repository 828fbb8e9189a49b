"""Values that replicas begin with: they are compared once, at the end of the first backward."""

import pytest
import torch
import torch.distributed as dist
from support.mesh_models import either_way, replicas
from support.models import (
    Stack,
    assert_same_gradients,
    batch_of,
    compiled,
    mine,
    shard,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from deepcompile_zero3 import Zero3Error, fully_shard
from deepcompile_zero3.sharding.layouts.checksum import checksum


def _initialized_apart(how):
    model = Stack()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    model, reference = shard(model, model.blocks, mesh=replicas())
    apart = {"blocks.0.up.weight": 2, "head.bias": 3}  # the rank that has another value

    def negate():
        for name, rank in apart.items():
            if dist.get_rank() == rank:
                model.get_parameter(name).detach().to_local().neg_()

    negate()
    run = compiled(model, how)
    batch = batch_of(8, 8)
    for _ in range(2):
        with pytest.raises(Zero3Error, match="on all ranks before the model is built") as raised:
            run(mine(batch)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        for name, rank in apart.items():
            told = f"{name}' on rank {rank} is not what it is on rank {rank - 2}"
            assert str(raised.value).count(name) == str(raised.value).count(told) == 1
    negate()
    exchanges = []
    for seed in range(2):
        loss = run(mine(batch_of(8, 8, seed=seed))).square().mean()
        with CommDebugMode() as collectives:  # counts none of the runtime's
            loss.backward()
        exchanges.append(collectives.get_total_counts())
        reference(batch_of(8, 8, seed=seed)).square().mean().backward()
        assert_same_gradients(model, reference)
    assert exchanges[0] > exchanges[1] == 0


@either_way
def test_replicas_that_begin_with_other_values_are_named_once_and_on_all_ranks(run_ranks, how):
    run_ranks(4, _initialized_apart, how)


def _alike():
    """Replicas differ in what means nothing: signs of zeros, and bits of NaNs."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = nn.Linear(8, 8).to(dtype)
        with torch.no_grad():
            model.weight[:2] = -0.0 if dist.get_rank() < 2 else 0.0
            model.bias[:2] = -torch.nan if dist.get_rank() < 2 else torch.nan
        fully_shard(model, mesh=replicas())
        model(torch.ones(1, 8, dtype=dtype)).sum().backward()
        assert model.bias.grad is not None


def test_signs_of_zeros_and_nans_are_no_difference(run_ranks):
    run_ranks(4, _alike)


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.complex128, torch.bool])
def test_values_without_gradients_are_compared_by_their_bytes(dtype):
    values = torch.arange(64, dtype=torch.uint8)
    one, other = (bits.view(dtype) for bits in (values % 2, values.flip(0) % 2))
    assert checksum(one) == checksum(one.clone()) != checksum(other)


def test_a_checksum_depends_on_the_order_of_all_values():
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    moved = [values.roll(1 << places) for places in range(18)]
    assert len({checksum(each) for each in (values, *moved)}) == 19


def _replaced():
    """One rank replaces parameters, which the others learn from the comparison."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    # Backward gathers nothing, which that rank could not.
    fully_shard(model, mesh=replicas(), reshard_after_forward=False)
    loss = model(torch.ones(1, 8)).sum()
    shards = [model[0].weight, model[1].bias]
    if dist.get_rank() == 2:
        model[0]._parameters["weight"] = nn.Parameter(torch.ones(8, 8))
        model[1]._parameters["bias"] = nn.Parameter(shards[1].detach().double(), False)
    with pytest.raises(Zero3Error) as raised:
        loss.backward()
    assert "on rank 2, '0.weight' was replaced by a Parameter after" in str(raised.value)
    assert "on rank 2, '1.bias' was torch.float32 when it was sharded" in str(raised.value)
    model[0]._parameters["weight"], model[1]._parameters["bias"] = shards
    model(torch.ones(1, 8)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_parameter_that_one_rank_replaced_is_an_error_on_all(run_ranks):
    run_ranks(4, _replaced)


def _on_crossing_meshes():
    """The second layer differs on ranks 0 and 1, which share the first with ranks 2 and 3."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("x", "y", "shard"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer, dim in zip(model, "xy", strict=True):
        fully_shard(layer, mesh=mesh[dim, "shard"])
    fully_shard(model, mesh=mesh["x", "shard"])
    rank = dist.get_rank()
    bias = model[1].bias.detach().to_local()
    if rank == 1:
        bias.neg_()
    loss = model(torch.ones(1, 8)).sum()
    if rank < 2:
        with pytest.raises(Zero3Error, match=r"'1\.bias' on rank 1 is not .* ignored_params of"):
            loss.backward()
    else:
        loss.backward()
    if rank == 1:
        bias.neg_()
    model.zero_grad()
    for again in (True, False):
        loss = model(torch.ones(1, 8)).sum()
        with CommDebugMode() as collectives:  # counts none of the runtime's
            loss.backward()
        assert (collectives.get_total_counts() > 0) == (again and rank < 2)
        assert all(p.grad is not None for p in model.parameters())


def test_ranks_of_crossing_meshes_remember_the_comparison_alike(run_ranks):
    run_ranks(4, _on_crossing_meshes)
