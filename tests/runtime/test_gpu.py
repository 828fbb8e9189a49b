"""Steps on a GPU: NCCL with one rank, and two ranks that share the GPU over gloo."""

import pytest
import torch
import torch.distributed as dist
from support.experts import TWO, loss_of_all, sharded
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    mean_square,
    mine,
    optimizers_of,
    shard,
    step,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from deepcompile_zero3 import (
    Owned,
    Zero3Error,
    clip_grad_norm_,
    fully_shard,
    record_collectives,
    step_in_backward,
)
from deepcompile_zero3.runtime import _C

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(not _C.WITH_CUDA, reason="the runtime was built without CUDA"),
]
each_way = pytest.mark.parametrize("how", ["zero3", "interpreted", "eager"])


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


def _offloaded(how, pin_memory=True, **settings):
    """Returns a model with shards in host memory, the same on the CPU, and the first to run."""
    model = Stack(width=256, depth=3)
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    model, reference = shard(model, model.blocks, offload_policy=policy, **settings)
    return model, reference, compiled(model, how)


def _from_host(run):
    return lambda batch: run(batch.cuda()).cpu()


def _all_on_host(tensors, pinned=True):
    tensors = [local for t in tensors if not (local := t.to_local()).is_meta]
    assert tensors
    assert all(t.is_cpu and t.is_pinned() == pinned for t in tensors)


def _train_offloaded(how, steps=3, pin_memory=True, **settings):
    torch.cuda.set_device(0)
    model, reference, run = _offloaded(how, pin_memory, **settings)
    run = _from_host(run)
    optimizers = optimizers_of(model, reference)
    for seed in range(steps):
        batch = batch_of(8, 256, seed=seed)
        mean_square(run, mine(batch)).backward()
        _all_on_host((p.grad for p in model.parameters()), pin_memory)
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.grad = None
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    _all_on_host(model.parameters(), pin_memory)
    assert all(state["momentum_buffer"].is_cpu for state in optimizers[0].state.values())


@each_way
@pytest.mark.parametrize("transport", ["auto", "c10d"])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_shards_in_host_memory_train_alike(nccl_and_gloo, how, transport, pin_memory):
    _train_offloaded(how, pin_memory=pin_memory, transport=transport)


def _train_offloaded_over_gloo(how, shape, **settings):
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    _train_offloaded(how, 2, mesh=mesh, **settings)


@each_way
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@pytest.mark.xdist_group("two ranks")
def test_shards_of_two_ranks_in_host_memory(two_ranks, how, shape):
    two_ranks(_train_offloaded_over_gloo, how, shape)


def _train_owned_in_host_memory():
    owned = {"shard_placement_fn": lambda p: Owned(1) if p.dim() == 2 else None}
    _train_offloaded_over_gloo("interpreted", (2,), **owned)


@pytest.mark.xdist_group("two ranks")
def test_a_rank_owns_matrices_in_host_memory(two_ranks):
    two_ranks(_train_owned_in_host_memory)


@each_way
def test_host_memory_keeps_what_a_forward_reads(nccl_and_gloo, how):
    model, _, run = _offloaded(how)
    batch = batch_of(8, 256).cuda()
    run(batch)  # a forward that no backward follows
    with torch.no_grad():
        expected = run(batch).clone()
        torch.cuda._sleep(10**9)  # half a second in which nothing else runs there
        found = run(batch)
        for parameter in model.parameters():
            parameter.to_local().zero_()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("how", ["interpreted", "eager"])
def test_a_forward_does_not_wait_for_host_memory(nccl_and_gloo, how):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _, run = _offloaded(how, mp_policy=policy)
    model.blocks[0].norm.requires_grad_(False)
    batch = batch_of(8, 256).cuda()
    for _ in range(3):
        mean_square(run, batch).backward()
    torch.cuda._sleep(10**9)
    loss = mean_square(run, batch)
    assert not torch.cuda.current_stream().query()
    loss.backward()


@pytest.mark.parametrize("how", ["interpreted", "eager"])
def test_columns_in_host_memory(nccl_and_gloo, how):
    _train_offloaded(how, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)


def test_gradients_in_host_memory_accumulate_and_are_clipped(nccl_and_gloo):
    model, reference, run = _offloaded("interpreted")
    run = _from_host(run)
    for seed in range(2):
        batch = batch_of(8, 256, seed=seed)
        mean_square(run, batch).backward()
        mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    norms = [
        clip(m.parameters(), 0.1)
        for m, clip in ((model, clip_grad_norm_), (reference, torch.nn.utils.clip_grad_norm_))
    ]
    torch.testing.assert_close(*norms)
    assert_same_gradients(model, reference)


def test_gradients_in_host_memory_are_stepped_in_backward(nccl_and_gloo):
    model, reference, run = _offloaded("interpreted")
    run = _from_host(run)
    optimizers = optimizers_of(model, reference)
    step_in_backward(model, optimizers[0])
    for seed in range(3):
        batch = batch_of(8, 256, seed=seed)
        mean_square(run, batch).backward()
        mean_square(reference, batch).backward()
        step(optimizers[1:])
    torch.testing.assert_close(run(batch), reference(batch))


@pytest.mark.parametrize("how", ["zero3", "interpreted"])
def test_quantized_gathers_from_host_memory(nccl_and_gloo, how):
    model, reference, _ = _offloaded(how)
    run = compiled(model, how, gather_dtype=torch.int8)
    batch = batch_of(8, 256)
    torch.testing.assert_close(run(batch.cuda()).cpu(), reference(batch), rtol=0.05, atol=0.05)


def test_shards_are_materialized_in_host_memory(nccl_and_gloo):
    with torch.device("meta"):
        model = Stack(width=256, depth=1)
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cuda")
    with pytest.raises(Zero3Error, match=r"is on cuda:0, but CPUOffloadPolicy keeps it on the CPU"):
        model(batch_of(8, 256).cuda())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    model(batch_of(8, 256).cuda()).sum().backward()
    _all_on_host((*model.parameters(), *(p.grad for p in model.parameters())))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_codes_on_the_gpu_are_those_on_the_cpu(dtype):
    values = torch.randn(33, 1024) * torch.logspace(-30, 30, 33)[:, None]
    values[3, 5], values[4, 7], values[5] = torch.inf, torch.nan, 0.0
    for block in (32, 64, 1024):
        name = f"{dtype}/{block}"
        on_cpu, on_gpu = _C.quantize(values, name), _C.quantize(values.cuda(), name)
        assert torch.equal(on_gpu.cpu(), on_cpu)
        read = [torch.empty_like(values), torch.empty_like(values, device="cuda")]
        _C.dequantize(read[0], on_cpu, name)
        _C.dequantize(read[1], on_gpu, name)
        torch.testing.assert_close(read[1].cpu(), read[0], rtol=0, atol=0, equal_nan=True)
