"""Sums over replicas in low precision: they are rounded once, and do not overflow.

Collectives round in the dtype of the wire at each addition, and float16 is divided partly before
the sum: tests of one rounding are marked ``gloo``.
"""

import math

import pytest
import torch
import torch.distributed as dist
from support.mesh_models import either_way, replicas
from support.models import Stack, batch_of, compiled, mine, relative_difference, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from deepcompile_zero3 import fully_shard, record_collectives


def _low_precision(how, reduce_dtype, tolerance):
    mesh = replicas()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, theirs = shard(Stack(depth=1), mesh=mesh, mp_policy=policy)
    torch_fully_shard(theirs, mesh=mesh, mp_policy=policy)
    run = compiled(model, how)
    for seed in range(2):
        rows = mine(batch_of(8, 8, seed=seed))
        with record_collectives() as log:
            for sharded, forward in ((model, run), (theirs, theirs)):
                sharded.set_requires_all_reduce(seed == 1)
                forward(rows).float().square().mean().backward()
    assert {c.dtype for c in log if c.op == "all_reduce"} == {reduce_dtype}
    for (fqn, ours), expected in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert ours.grad.dtype == expected.grad.dtype, fqn
        local = ours.grad.to_local()
        copies = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(copies, local, group=mesh.get_group("replicate"))
        assert torch.equal(*copies), fqn
        assert relative_difference(local, expected.grad.to_local()) <= tolerance, fqn


@pytest.mark.thin
@either_way
@pytest.mark.parametrize(
    ("reduce_dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_replicas_get_the_same_bits_and_fsdp2s_values(run_ranks, how, reduce_dtype, tolerance):
    run_ranks(4, _low_precision, how, reduce_dtype, tolerance)


class _Products(nn.Module):
    """A model whose weights get given gradients."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        self.second = nn.Parameter(torch.ones(2, 2, dtype=dtype))

    def forward(self, first, second, is_swapped=False):
        products = [(self.first, first), (self.second, second)]
        return sum((w * g).sum() for w, g in (products[::-1] if is_swapped else products))


def _sum_over_replicas():
    mesh = replicas(2)
    rank = dist.get_rank()

    tiny = 2.0**-24  # the smallest float16, whose mean is as small
    model = fully_shard(
        _Products(), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)
    )
    model(tiny, 2.0, is_swapped=bool(rank)).backward()  # gradients come in another order
    assert (model.first.grad.full_tensor() == tiny).all()
    assert (model.second.grad.full_tensor() == 2).all()

    model = _Products(torch.bfloat16)
    model.first.grad_dtype = None
    fully_shard(model, mesh=mesh)
    for micro_batch in range(300):
        model.set_requires_all_reduce(micro_batch == 299)
        model(1.0, 0.0).backward()
    assert (model.first.grad.full_tensor() == 300).all()  # in bfloat16, 256 + 1 is 256


@pytest.mark.gloo
def test_sums_over_replicas_are_rounded_once(run_ranks):
    run_ranks(2, _sum_over_replicas)


def _small_and_large(transport):
    """Sums small and large gradients: rounded to bfloat16 each time, 256 + 0.5 + 0.5 + 1 is 256."""
    model = fully_shard(_Products(torch.bfloat16), transport=transport)
    model((256.0, 0.5, 0.5, 1.0)[dist.get_rank()], 0.0).backward()
    assert (model.first.grad.full_tensor() == 64.5).all()


@pytest.mark.gloo
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_sums_of_low_precision_are_rounded_once(run_ranks, transport):
    run_ranks(4, _small_and_large, transport)


def _halves(transport, shape, dtype):
    """Reduces gradients whose sum exceeds float16's maximum, 65504, but whose mean does not."""
    mesh = init_device_mesh("cpu", shape)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = fully_shard(_Products(dtype), mesh=mesh, mp_policy=policy, transport=transport)
    tiny = 2.0**-24
    model(40000.0, tiny).backward()
    assert (model.first.grad.full_tensor() == 40000).all()
    assert (model.second.grad.full_tensor() == tiny).all()


@pytest.mark.gloo
@pytest.mark.thin
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 2)], ids=str)
def test_a_mean_that_fits_float16_does_not_overflow(run_ranks, shape, transport, dtype):
    run_ranks(math.prod(shape), _halves, transport, shape, dtype)


def _halves_divided_by_a_factor():
    model = fully_shard(
        _Products(),
        mesh=init_device_mesh("cpu", (dist.get_world_size(), 1)),
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16),
    )
    for factor in (3.0, 0.5):
        model.set_gradient_divide_factor(factor)
        model(3.0, 6.0).backward()
        for parameter, gradient in ((model.first, 3.0), (model.second, 6.0)):
            assert (parameter.grad.full_tensor() == 2 * gradient / factor).all()
        model.zero_grad()


def test_a_factor_divides_float16_sums_over_replicas(run_ranks):
    run_ranks(2, _halves_divided_by_a_factor)


def _used_twice(how):
    model = _Products(torch.bfloat16)
    model.first.grad_dtype = torch.float32
    fully_shard(model, shard_placement_fn=lambda p: Shard(1))
    (compiled(model, how)(256.0, 0.0) + model(1.0, 0.0)).backward()
    assert (model.first.grad.full_tensor() == 257).all()

    class Twice(_Products):
        def forward(self):
            return (self.first * 256.0).sum() + (self.first * 1.0).sum()

    model = Twice(torch.bfloat16)
    model.first.grad_dtype = torch.float32
    fully_shard(model, shard_placement_fn=lambda p: Shard(1))
    compiled(model, how)().backward()
    assert (model.first.grad.full_tensor() == 257).all()


@either_way
def test_uses_of_a_weight_that_is_sharded_by_columns_are_cast_before_they_are_summed(
    run_ranks, how
):
    run_ranks(2, _used_twice, how)
