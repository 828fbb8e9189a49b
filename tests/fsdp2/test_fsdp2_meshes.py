"""Scenarios of FSDP2's own tests: meshes of groups, of three dimensions, and of one rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.models import (
    Block,
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    mean_square,
    mine,
    shard,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

from deepcompile_zero3 import fully_shard

# ---- meshes


def _of_groups():
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    shards, replicas = pairs[rank // 2], pairs[2 + rank % 2]
    mesh = DeviceMesh.from_group(
        [replicas, shards],
        "cpu",
        mesh=torch.arange(4).view(2, 2),
        mesh_dim_names=("replicate", "shard"),
    )
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks, mesh=mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            if rank >= 2:
                parameter.fill_(7)
            dist.broadcast(parameter.to_local(), src=rank % 2, group=replicas)
    assert_same_parameters(model, reference)
    mean_square(model, mine(batch_of(4, 8))).backward()
    mean_square(reference, batch_of(4, 8)).backward()
    assert_same_gradients(model, reference)


def test_a_mesh_may_be_made_of_groups_and_replicas_of_the_first(run_ranks):
    run_ranks(4, _of_groups)


class Parallel(Block):
    """A block with tensor parallelism, and a layer without."""

    def __init__(self, width):
        super().__init__(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(super().forward(x))


def _in_three_dimensions():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = Parallel(8)
    reference = copy.deepcopy(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["replicate", "shard"])
    data = mesh["replicate"].get_group()
    for seed in range(2):
        mean_square(model, mine(batch_of(4, 8, seed=seed), data)).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        assert_same_gradients(model, reference)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(ours.full_tensor(), theirs)
    assert model.up.weight.device_mesh.ndim == 3


def test_replicas_may_be_tensor_parallel(run_ranks):
    run_ranks(4, _in_three_dimensions)


def _by_columns():
    place = lambda p: Shard(1) if p.dim() > 1 else None  # noqa: E731
    model = fully_shard(Block(8), shard_placement_fn=place)

    def see(module, args):
        assert all(p.is_contiguous() for p in (module.weight, module.bias))

    for layer in (model.up, model.down):
        layer.register_forward_pre_hook(see)
    model(mine(batch_of(4, 8))).sum().backward()
    for parameter in model.parameters():
        for tensor in (parameter, parameter.grad):
            assert tensor.is_contiguous()
            assert tensor.to_local().is_contiguous()


def test_shards_of_columns_are_contiguous(run_ranks):
    run_ranks(2, _by_columns)


# ---- one rank


@needs_a_job
@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_one_rank_divides_by_the_factor_too(factor):
    model = fully_shard(nn.Linear(8, 4, bias=False))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    model(torch.ones(3, 8)).sum().backward()
    assert torch.equal(model.weight.grad.to_local(), torch.full((4, 8), 3 / (factor or 1)))
