"""A model, its callable, its graph and its process group may end in any order; nothing leaks."""

import gc
import os
import random

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.models import (
    Stack,
    assert_same_step,
    assert_same_steps,
    batch_of,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim import optimizer as optimizer_hooks

from deepcompile_zero3 import buffer_stats, fully_shard, release_buffers
from deepcompile_zero3.runtime import _C

LIVES = ["model", "run", "optimizer", "graph", "group"]


def _shared_mappings():
    """Returns the number of shared memory mappings of this process."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:zero3" in line for line in maps)


def _end(transport, how, orders):
    """Frees the objects of a step in each of ``orders``, with a backward still to come."""
    batch = mine(batch_of(4, 8))
    models, mappings = len(_C.live_model_numbers()), []
    for order in orders:
        group = dist.new_group()
        mesh = DeviceMesh.from_group(group, "cpu")
        model = fully_shard(Stack(), mesh=mesh, transport=transport)
        options = {"inductor": False}
        run = model if how == "eager" else torch.compile(model, backend="zero3", options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            mean_square(run, batch).backward()
            optimizer.step()
        lives = {"model": model, "run": run, "optimizer": optimizer, "group": group}
        lives["graph"] = mean_square(run, batch)
        del model, run, optimizer, group, mesh
        for name in order:
            life = lives.pop(name)
            if name == "group":
                dist.destroy_process_group(life)
            del life
            gc.collect()
        torch._dynamo.reset()
        gc.collect()
        assert len(_C.live_model_numbers()) == models, f"a model outlives {order}"
        mappings.append(_shared_mappings())
    # Mappings of a group that torch still remembers are freed when another group is used.
    assert max(mappings[1:]) <= mappings[0], mappings
    assert len(dist.distributed_c10d._world.pg_names) <= 3  # the job's, and two of the last
    _train_another(transport)


def _train_another(transport):
    _clear_sharding_prop_cache()  # DTensor's cache would return a mesh with the freed group
    model, reference = shard(Stack(), transport=transport)
    assert_same_step(model, reference, batch_of(4, 8), optimizers=optimizers_of(model, reference))


@pytest.mark.parametrize(
    ("transport", "how", "count"),
    [
        ("shared_memory", "interpreted", 2),
        ("c10d", "eager", 2),
        *(
            pytest.param(transport, how, 12, marks=pytest.mark.long)
            for transport in ("shared_memory", "c10d")
            for how in ("eager", "interpreted")
        ),
    ],
)
def test_lives_may_end_in_any_order(run_ranks, transport, how, count):
    shuffled = random.Random(0)
    orders = [shuffled.sample(LIVES, len(LIVES)) for _ in range(count)]
    run_ranks(2, _end, transport, how, orders)


@pytest.mark.parametrize("how", ["eager", "interpreted"])
def test_a_run_leaves_neither_a_model_nor_a_group(run_ranks, how):
    run_ranks(2, _train, how)
    ranks = run_ranks(2, os.getpid)
    run_ranks(2, _train, how)
    assert run_ranks(2, os.getpid) == ranks  # else a pool would have started others


def _train(how):
    model, reference = shard(Stack())
    assert_same_steps(model, reference, how, 4, 8)


def _destroy_with_work_in_flight(transport):
    """Destroys the group after a forward has raised while the next block's gather is in flight."""
    group = dist.new_group()
    model = Stack(depth=3)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, transport=transport)
    fully_shard(model, mesh=mesh, transport=transport)
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])

    def fail(*_):
        raise ValueError("in the first block")

    model.blocks[0].register_forward_hook(fail)
    with pytest.raises(ValueError, match="in the first block"):
        model(batch_of(2, 8))
    dist.destroy_process_group(group)
    del model, mesh, block, following
    gc.collect()
    release_buffers()
    _train_another(transport)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_a_group_may_go_with_work_in_flight(run_ranks, transport):
    run_ranks(2, _destroy_with_work_in_flight, transport)


def _destroy_with_dropped_work(frees):
    """Destroys the group of a gather that was started and dropped, which nothing waits for."""
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    model = fully_shard(nn.Linear(512, 512), mesh=mesh, transport="c10d")
    before = buffer_stats().in_use
    model.unshard(async_op=True)
    model.reshard()
    nbytes = buffer_stats().in_use - before
    assert nbytes >= 4 * 512 * 512, "the transfer still needs its tensors"
    dist.barrier()
    dist.destroy_process_group(group)
    if frees == "release_buffers":
        release_buffers()
    else:
        _train_another("c10d")
    assert buffer_stats().in_use <= before


@pytest.mark.parametrize("frees", ["release_buffers", "another group"])
def test_tensors_of_dropped_work_end_with_its_group(run_ranks, frees):
    run_ranks(2, _destroy_with_dropped_work, frees)


@needs_a_job
def test_a_model_may_be_collected_while_an_optimizer_steps():
    def hooks():
        return [*optimizer_hooks._global_optimizer_pre_hooks.values()]

    gc.collect()
    gc.disable()
    handle = optimizer_hooks.register_optimizer_step_pre_hook(lambda *_: gc.collect() and None)
    try:
        before = hooks()
        model = fully_shard(nn.Linear(4, 4))
        model.itself = model
        assert len(hooks()) > len(before)
        del model
        plain = nn.Linear(4, 4)
        plain(batch_of(2, 4)).sum().backward()
        optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
        optimizer.step()  # collects the model between two hooks
        gc.collect()
        assert hooks() == before
        shard(Stack())
    finally:
        handle.remove()
        gc.enable()
