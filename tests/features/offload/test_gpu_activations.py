"""Activations that wait in host memory on a GPU."""

import pytest
import torch
import torch.distributed as dist
from support.models import Stack, batch_of, compiled, mean_square, mine, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from deepcompile_zero3 import capture_graphs, explain
from deepcompile_zero3.runtime import _C, ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(not _C.WITH_CUDA, reason="the runtime was built without CUDA"),
]
each_way = pytest.mark.parametrize("how", ["zero3", "interpreted"])
ROWS, WIDTH, MIB = 1024, 256, 2**20  # an activation [ROWS, WIDTH] takes 1 MiB


def _train(how, steps=3, width=WIDTH, settings=None, **options):
    """Returns losses and gradients of some steps."""
    torch.manual_seed(0)
    model = Stack(width=width, depth=4).cuda()
    model, _ = shard(model, model.blocks, **(settings or {}))
    run, optimizer = compiled(model, how, **options), torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for seed in range(steps):
        loss = mean_square(run, mine(batch_of(2 * ROWS, width, seed=seed)).cuda())
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    torch.compiler.reset()
    return found


def _assert_same(found, expected):
    assert len(found) == len(expected) > 3
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("activations_mb", [0, 6])
def test_no_bit_changes(nccl, how, regions, activations_mb):
    expected = _train(how, regions=regions)
    _assert_same(_train(how, regions=regions, activations_mb=activations_mb), expected)


def test_inductor_may_pad_rows(nccl):
    expected = _train("zero3", width=1365)  # rows of 2730 elements may take 2752
    found = _train("zero3", width=1365, activations_mb=0)
    torch.testing.assert_close(found, expected)  # products take other kernels for other strides


def test_no_bit_changes_with_shards_in_host_memory(nccl_and_gloo):
    settings = {"offload_policy": CPUOffloadPolicy()}
    expected = _train("interpreted", settings=settings)
    _assert_same(_train("interpreted", settings=settings, activations_mb=0), expected)


def _train_over_gloo():
    torch.cuda.set_device(0)
    settings = {"mesh": init_device_mesh("cuda", (dist.get_world_size(),))}
    expected = _train("zero3", settings=settings)
    _assert_same(_train("zero3", settings=settings, activations_mb=0), expected)


@pytest.mark.xdist_group("two ranks")
def test_no_bit_changes_on_two_ranks(two_ranks):
    two_ranks(_train_over_gloo)


def _allocated_by_forward(how, **options):
    """Returns bytes on the GPU that a forward leaves for its backward, and its peak."""
    torch.manual_seed(0)
    model = Stack(width=WIDTH, depth=8).cuda()
    run = compiled(shard(model, model.blocks)[0], how, **options)
    batch = batch_of(ROWS, WIDTH).cuda()
    for _ in range(2):
        mean_square(run, batch).backward()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = mean_square(run, batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    found = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.compiler.reset()
    return found, peak


@each_way
def test_activations_leave_the_gpu(nccl, how):
    everything, _ = _allocated_by_forward(how)
    assert everything > 30 * MIB
    none, peak = _allocated_by_forward(how, activations_mb=0)
    assert none < 4 * MIB
    assert peak < 20 * MIB
    some, peak = _allocated_by_forward(how, activations_mb=16)
    assert some < 20 * MIB
    assert peak < 30 * MIB


def test_a_graph_that_is_retained_loads_twice(nccl):
    model = Stack(width=WIDTH, depth=3).cuda()
    run = compiled(shard(model, model.blocks)[0], "interpreted", activations_mb=0)
    loss = mean_square(run, batch_of(ROWS, WIDTH).cuda())
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for parameter, grad in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad.to_local(), 2 * grad.to_local())


@pytest.mark.parametrize("device", ["cuda", "cpu"])  # where a hook puts what was saved
def test_hooks_on_saved_tensors_may_put_them_elsewhere(nccl, device):
    batch = batch_of(ROWS, WIDTH).cuda()
    model = Stack(width=WIDTH, depth=3).cuda()
    model, reference = shard(model, model.blocks)
    run = compiled(model, "interpreted", activations_mb=0)

    def pack(tensor):
        return tensor.to(device, copy=True) if tensor.is_cpu else tensor

    torch.cuda._sleep(10**8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = mean_square(run, batch)
    loss.backward()
    mean_square(reference, batch).backward()
    for mine_, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine_.grad.to_local(), whole.grad)


def test_explain_shows_what_is_in_host_memory(nccl):
    model = Stack(width=WIDTH, depth=3).cuda()
    shard(model, model.blocks)
    options = {"inductor": False, "activations_mb": 0}
    report = explain(model, batch_of(ROWS, WIDTH).cuda(), options=options)
    assert "MiB in host memory, and" in str(report)


@pytest.mark.parametrize("strides", [(2752, 1), (1, 2752)])
def test_copies_of_padded_tensors_are_dense(nccl, strides):
    tensor = torch.empty_strided((2730, 2730), strides, device="cuda").normal_()
    stored = ops.store_wait(ops.store_start(tensor), tensor)
    torch.cuda.synchronize()
    assert stored.stride() == torch.empty_like(tensor).stride()
    assert torch.equal(stored, tensor.cpu())


def test_copies_run_beside_the_computation(nccl):
    tensor = torch.randn(64, 32, device="cuda").t()
    ops.store_wait(ops.store_start(tensor), tensor)  # takes page-locked memory and a stream
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    handle = ops.store_start(tensor)
    stored = ops.store_wait(handle, tensor)
    assert not torch.cuda.current_stream().query()  # the host has not waited
    assert stored.is_pinned()
    assert stored.stride() == tensor.stride()
    loaded = ops.load_wait(ops.load_start(stored, device="cuda"), stored, device="cuda")
    assert loaded.stride() == tensor.stride()
    assert torch.equal(loaded, tensor)


def test_a_copy_that_nobody_waits_for_is_made_before_its_memory_is_used_again(nccl):
    stored = torch.arange(2**22, dtype=torch.float32).pin_memory()
    torch.cuda._sleep(10**8)
    ops.load_start(stored, device="cuda")  # the handle dies
    other = torch.full((2**22,), -1.0, device="cuda")
    torch.cuda.synchronize()
    assert (other == -1).all()


@each_way
def test_graphs_store_and_load(nccl, how):
    model = Stack(width=WIDTH, depth=3).cuda()
    run = compiled(shard(model, model.blocks)[0], how, activations_mb=0)
    with capture_graphs() as graphs:
        mean_square(run, batch_of(ROWS, WIDTH).cuda()).backward()
    forward, backward = graphs.forward[0].text, graphs.backward[0].text
    assert forward.count("zero3.store_start(") == forward.count("zero3.store_wait(") > 4
    assert backward.count("zero3.load_start(") == forward.count("zero3.store_start(")
