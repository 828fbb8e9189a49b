"""Python's signal handlers while a rank waits for others: what a preempted job saves there."""

import io
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.faults import each_transport
from support.models import (
    Stack,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    mean_square,
    shard,
)
from support.ranks import RankPool
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import Zero3Error, fully_shard
from deepcompile_zero3.runtime import _C


class _Handler:
    """A handler of SIGUSR2 that saves the model, as one of a cluster's preemption does."""

    def __init__(self, model, how, transport):
        self.model, self.waits = model, transport == "shared_memory"
        self.records = how == "eager"  # torch runs compiled graphs below autograd
        self.saved = []
        self.errors = []
        signal.signal(signal.SIGUSR2, self)

    def __call__(self, *_):
        try:
            assert _C.handles_signals() == self.waits
            file = io.BytesIO()
            torch.save(self.model.state_dict(), file)
            self.saved.append(file)
            twice = [parameter.detach() * 2 for parameter in self.model.parameters()]
            assert all(isinstance(each, DTensor) for each in twice)
            if self.records:
                x = torch.ones(2, requires_grad=True)
                with torch.enable_grad():
                    (x * x).sum().backward()
            if self.waits:
                assert isinstance(self.model.head.weight, DTensor)
                with pytest.raises(Zero3Error, match="a signal handler cannot run"):
                    self.model(torch.ones(1, 8))
        except BaseException as error:  # not in the wait, whose step it would end
            self.errors.append(error)


def _save_in_a_wait(how, transport, moment):
    model = Stack()
    model, reference = shard(model, model.blocks, transport=transport)
    run = compiled(model, how)
    batch = batch_of(4, 8)
    assert_same_step(model, reference, batch, run=run)
    model.zero_grad()
    reference.zero_grad()
    handler = _Handler(model, how, transport)

    def come_late(called, step):
        if called is not run or moment != step:
            return
        if dist.get_rank() == 1:
            time.sleep(0.6)
        else:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()

    def loss(called, x):
        come_late(called, "forward")
        result = mean_square(called, x)
        come_late(called, "backward")
        return result

    assert_same_step(model, reference, batch, run=run, loss=loss)
    assert not handler.errors, repr(handler.errors)
    if dist.get_rank() == 0:
        handler.saved[0].seek(0)
        saved = torch.load(handler.saved[0], weights_only=False)
        for name, parameter in model.named_parameters():
            assert torch.equal(saved[name].to_local(), parameter.to_local())


@pytest.mark.thin
@each_transport
@pytest.mark.parametrize("moment", ["forward", "backward"])
@each_way
def test_a_handler_saves_shards_while_the_rank_waits(run_ranks, how, transport, moment):
    run_ranks(2, _save_in_a_wait, how, transport, moment)


def _gather_in_a_wait():
    model = Stack(depth=3)
    model, reference = shard(model, model.blocks, transport="shared_memory")
    errors = []

    def gather(*_):
        try:
            model.blocks[1].unshard()  # which has started ahead
        except Zero3Error as error:
            errors.append(str(error))

    signal.signal(signal.SIGUSR2, gather)
    for number in range(4):
        if number == 2 and dist.get_rank() == 1:
            time.sleep(0.6)
        elif number == 2:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        assert_same_step(model, reference, batch_of(4, 8, seed=number))
        model.zero_grad()
        reference.zero_grad()
    if dist.get_rank() == 0:
        assert len(errors) == 1
        assert "a signal handler cannot gather" in errors[0]


@pytest.mark.gloo
def test_a_handler_cannot_take_what_has_started_ahead(run_ranks):
    run_ranks(2, _gather_in_a_wait)


def _modes_in_a_wait():
    model = fully_shard(nn.Linear(8, 8), transport="shared_memory")
    seen = []
    signal.signal(
        signal.SIGUSR2,
        lambda *_: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled())),
    )
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        dist.barrier()
        with mode():
            if dist.get_rank() == 1:
                time.sleep(0.4)
            else:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
            model(torch.ones(1, 8))
    if dist.get_rank() == 0:
        assert seen == [(True, False), (False, False), (False, True)]


@pytest.mark.gloo
def test_a_handler_runs_in_the_modes_of_the_code_that_it_interrupts(run_ranks):
    run_ranks(2, _modes_in_a_wait)


def _wait_on_a_daemon_thread():
    model = fully_shard(nn.Linear(8, 8), transport="shared_memory")
    if dist.get_rank() == 0:
        threading.Thread(target=model, args=(torch.ones(1, 8),), daemon=True).start()
        time.sleep(0.3)


@pytest.mark.more
@pytest.mark.gloo
def test_a_process_may_end_while_a_daemon_thread_waits():
    pool = RankPool(2, "spawn")
    pool.run(_wait_on_a_daemon_thread, timeout=60)
    processes = [process for process, _ in pool._ranks]
    for _, pipe in pool._ranks:
        pipe.close()  # the processes end
    for process in processes:
        process.join(60)  # at once, but on a busy machine
    codes = [process.exitcode for process in processes]
    pool.close()
    assert codes == [0, 0]
