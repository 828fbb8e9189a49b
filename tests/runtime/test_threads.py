"""Two models of one process, each trained by a thread and over a process group of its own."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
from torch.distributed.device_mesh import DeviceMesh

from deepcompile_zero3 import Zero3Error

_BATCHES = [batch_of(4, 1024, seed=seed) for seed in range(8)]


def _train(run, optimizer, batches, barrier=None):
    for batch in batches:
        if barrier is not None:
            barrier.wait()
        mean_square(run, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def _train_beside(run, optimizer, batches, barrier):
    try:
        _train(run, optimizer, batches, barrier)
    except BaseException:
        barrier.abort()
        raise


def _sharded_and_trained(name, seed, transport):
    """Returns a sharded model, which has not trained, and an unsharded one that has."""
    torch.manual_seed(seed)
    # Gradients of 8 MiB are reduced in two blocks. A mesh with the other's names would equal it.
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=(name,))
    model = Stack(1024)
    model, reference = shard(model, model.blocks, mesh=mesh, transport=transport)
    _train(reference, *optimizers_of(reference), _BATCHES)
    return model, reference


def _train_in_two_threads(how, transport):
    pairs = [_sharded_and_trained(*arguments, transport) for arguments in (("a", 0), ("b", 1))]
    batches = [mine(batch) for batch in _BATCHES]
    runs = [(compiled(model, how), *optimizers_of(model)) for model, _ in pairs]
    for run, optimizer in runs:
        _train(run, optimizer, batches[:1])  # compiles: torch lets one thread at a time do so
    barrier = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(_train_beside, *each, batches[1:], barrier) for each in runs]
        errors = [error for result in results if (error := result.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error  # the cause, not that the other thread waited in vain
    for model, reference in pairs:
        assert_same_parameters(model, reference)


@pytest.mark.thin
@each_way
@pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("c10d", marks=pytest.mark.more)]
)
def test_two_threads_train_two_models(run_ranks, how, transport):
    run_ranks(2, _train_in_two_threads, how, transport)


def _one_of_two_raises():
    """Rank 1 raises in the backward of one model, and a thread of rank 0 stays further on in it.

    There, gradients wait that rank 1 will never send.
    """
    (broken, _), (model, reference) = (
        _sharded_and_trained(name, seed, "shared_memory") for seed, name in enumerate("ab")
    )
    is_first, entered, leaves = dist.get_rank() == 0, threading.Event(), threading.Event()

    def stay_or_raise(gradient):
        entered.set()
        if not is_first:
            raise ValueError("broken")
        leaves.wait(60)

    def watch(module, args, output):
        output.register_hook(stay_or_raise)

    broken.blocks[0 if is_first else 1].register_forward_hook(watch)

    def break_backward():
        mean_square(broken, mine(_BATCHES[0])).backward()

    with ThreadPoolExecutor(1) as threads:
        broke = threads.submit(break_backward)
        assert entered.wait(60)
        if not is_first:
            assert isinstance(broke.exception(), ValueError)
            time.sleep(0.5)  # the other rank waits meanwhile
        optimizers = optimizers_of(model)
        _train(model, *optimizers, [mine(batch) for batch in _BATCHES])
        leaves.set()
        if is_first:
            assert isinstance(broke.exception(), Zero3Error)
    assert_same_parameters(model, reference)


def test_a_thread_gets_no_error_of_another_ones_model(run_ranks):
    run_ranks(2, _one_of_two_raises)
