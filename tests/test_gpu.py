"""Steps on a GPU: NCCL with one rank, and two ranks that share the GPU over gloo."""

import functools

import pytest
import ranks
import torch
import torch.distributed as dist
from experts import TWO, loss_of_all, sharded
from mesh_models import step
from models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from one_rank import end, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3 import Owned, fully_shard, record_collectives
from deepcompile_zero3.runtime import _C

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(not _C.WITH_CUDA, reason="the runtime was built without CUDA"),
]
each_way = pytest.mark.parametrize("how", ["zero3", "interpreted", "eager"])


@pytest.fixture
def nccl(tmp_path):
    torch.cuda.set_device(0)
    start("nccl", tmp_path, device_id=torch.device("cuda", 0))
    yield
    end()


@pytest.fixture(scope="module")
def two_ranks():
    """Ranks that are new processes. torch's compiler counts the GPUs when it is imported, and a
    process that is forked afterwards cannot use them.
    """
    pool = ranks.RankPool(2, "spawn")
    yield functools.partial(pool.run, timeout=120)
    pool.close()


def _train(how, steps, **settings):
    model = Stack(width=256, depth=3).cuda()
    model, reference = shard(model, model.blocks, **settings)
    run, optimizers = compiled(model, how), optimizers_of(model, reference)
    for seed in range(steps):
        batch = batch_of(8, 256, seed=seed).cuda()
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@each_way
@pytest.mark.parametrize("transport", ["auto", "c10d"])  # nothing is sent, or all by NCCL
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_steps_are_those_of_the_whole_model(nccl, how, transport, reshard_after_forward):
    _train(how, 3, transport=transport, reshard_after_forward=reshard_after_forward)


def _train_over_gloo(how):
    torch.cuda.set_device(0)
    _train(how, 2, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))


@each_way
@pytest.mark.xdist_group("two ranks")
def test_two_ranks_share_the_gpu_over_gloo(two_ranks, how):
    two_ranks(_train_over_gloo, how)


def _train_owned_over_gloo(how):
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    _train(how, 2, mesh=mesh, shard_placement_fn=lambda p: Owned(1) if p.dim() == 2 else None)


@each_way
@pytest.mark.xdist_group("two ranks")
def test_a_rank_owns_matrices_on_the_gpu(two_ranks, how):
    two_ranks(_train_owned_over_gloo, how)


def _train_experts_over_gloo():
    torch.cuda.set_device(0)
    model, reference = sharded(256, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    reference.cuda()
    optimizers = optimizers_of(model, reference)
    for seed, choices in enumerate(TWO):
        batch = batch_of(4, 256, seed=seed).cuda()
        mean_square(lambda x, c=choices: model(x, c[dist.get_rank()]), mine(batch)).backward()
        loss_of_all(reference, batch, choices).backward()
        assert_same_gradients(model, reference)
        step(optimizers)


@pytest.mark.xdist_group("two ranks")
def test_experts_that_some_ranks_use_are_trained(two_ranks):
    two_ranks(_train_experts_over_gloo)


def test_buffers_move_to_the_gpu(nccl):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4))
    mean = model[1].running_mean
    fully_shard(model[0])
    fully_shard(model)
    assert all(buffer.is_cuda for buffer in model.buffers())
    assert model[1].running_mean is mean
    model(torch.ones(2, 4).cuda()).sum().backward()


def _sharded(policy):
    model = Stack(width=256, depth=3).cuda()
    return shard(model, model.blocks, mp_policy=policy, transport="c10d")[0]


@each_way
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_a_steady_step_waits_for_no_stream(nccl, how, reduce_dtype):
    model = _sharded(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    run = compiled(model, how)
    batch = batch_of(8, 256).cuda()
    for _ in range(3):
        mean_square(run, batch).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mean_square(run, batch).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_way
def test_the_wire_has_the_dtypes_of_the_policy(nccl, how):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run = compiled(_sharded(policy), how)
    batch = batch_of(8, 256).cuda()
    with record_collectives() as collectives:
        mean_square(run, batch).backward()
    dtypes = {(collective.op, collective.dtype) for collective in collectives}
    assert dtypes == {("all_gather", torch.bfloat16), ("reduce_scatter", torch.float32)}
