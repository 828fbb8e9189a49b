"""The step after one that failed on all ranks: in forward, in backward, by an interrupt."""

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.faults import LONG, TIMEOUT, each_transport, let
from support.models import (
    Stack,
    assert_same_step,
    batch_of,
    compiled,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def _raise(error):
    if error is KeyboardInterrupt:
        signal.raise_signal(signal.SIGINT)
    raise error("injected")


def _faulty_step(model, batch, optimizer, error_of_the_loader):
    if error_of_the_loader is not None:
        model.set_requires_gradient_sync(False)
        mean_square(model, mine(batch)).backward()
        _raise(error_of_the_loader)
    mean_square(model, mine(batch)).backward()
    optimizer.step()


def _recover(place, transport):
    """Takes steps that raise on all ranks, and checks the steps after them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = Stack()
    model, reference = shard(model, model.blocks, transport=transport)
    optimizers = optimizers_of(model, reference)
    armed = []

    def trap():
        for error in armed:
            _raise(error)

    let(trap, place, model, optimizers[0])
    for seed, error in enumerate(
        (ZeroDivisionError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)
    ):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, optimizers=optimizers)
        armed.append(error)
        with pytest.raises(error):
            _faulty_step(model, batch, optimizers[0], error if place == "loader" else None)
        armed.clear()
        model.set_requires_gradient_sync(True)
        if place == "loader":
            model.reset_iter_state()
        model.zero_grad()
    for seed in (8, 9):  # the second step sees the first one's changes
        assert_same_step(model, reference, batch_of(4, 8, seed=seed), optimizers=optimizers)


@pytest.mark.thin
@each_transport
@pytest.mark.parametrize("place", ["forward", "backward", "hook", "optimizer", "loader"])
def test_the_step_after_one_that_raises_on_all_ranks_is_right(run_ranks, place, transport):
    run_ranks(2, _recover, place, transport)


class _BrokenStack(Stack):
    """A stack whose graph breaks, so that code around the graphs runs eagerly."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def _interrupt_between_graphs(transport):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = _BrokenStack()
    model, reference = shard(model, model.blocks, transport=transport)
    optimizers = optimizers_of(model, reference)
    run = compiled(model, "interpreted")
    armed = []

    @torch.compiler.disable
    def trap(*_):
        for error in armed:
            _raise(error)

    model.blocks[1].register_forward_pre_hook(trap)
    assert_same_step(model, reference, batch_of(4, 8), run=run, optimizers=optimizers)
    armed.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        run(mine(batch_of(4, 8)))
    armed.clear()
    assert model._zero3_group.depth == 0
    for seed in range(3):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


class _Recursive(nn.Module):
    """A module that calls itself, and goes on if the inner call is interrupted."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.interrupts = False

    def forward(self, x, depth=1):
        if depth == 0:
            if self.interrupts:
                raise KeyboardInterrupt
            return self.linear(x)
        with contextlib.suppress(KeyboardInterrupt):
            x = self(x, depth - 1)
        return self.linear(x)


def _interrupt_within_itself(transport):
    model, reference = shard(_Recursive(), transport=transport)
    optimizers = optimizers_of(model, reference)
    for interrupts in (False, True, True, False):
        model.interrupts = reference.interrupts = interrupts
        assert_same_step(model, reference, batch_of(4, 8), optimizers=optimizers)
        assert model._zero3_group.depth == 0


@each_transport
def test_a_module_may_be_interrupted_where_it_calls_itself(run_ranks, transport):
    run_ranks(2, _interrupt_within_itself, transport)


@each_transport
def test_the_step_after_an_interrupt_between_graphs_is_right(run_ranks, transport):
    run_ranks(2, _interrupt_between_graphs, transport)


def _interrupt_a_wait(transport):
    """Interrupts rank 0 while it waits for rank 1; then both ranks begin again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = dist.new_group(timeout=timedelta(seconds=LONG))
    mesh = DeviceMesh.from_group(group, "cpu")
    model, reference = shard(Stack(), mesh=mesh, transport=transport)
    batch = batch_of(4, 8)
    assert_same_step(model, reference, batch)
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(TIMEOUT)
        if transport == "c10d":
            model(mine(batch))
    else:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            model(mine(batch))
    seconds = time.monotonic() - start
    dist.barrier()
    assert_same_step(*shard(Stack(), transport=transport), batch)
    return seconds


@pytest.mark.gloo
def test_a_wait_in_shared_memory_can_be_interrupted(run_ranks):
    seconds = run_ranks(2, _interrupt_a_wait, "shared_memory")[0]
    assert seconds < TIMEOUT - 0.5


def test_a_wait_for_messages_is_interrupted_when_it_ends(run_ranks):
    seconds = run_ranks(2, _interrupt_a_wait, "c10d")[0]
    assert seconds > TIMEOUT - 0.5
