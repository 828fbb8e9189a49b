"""Failures of ranks that share memory: one rank is killed, stopped, or does something else."""

import contextlib
import os
import re
import resource
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.models import (
    INDUCTOR_TOO,
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    shard,
)
from support.shared_memory import needs_shared_memory
from torch.distributed.device_mesh import DeviceMesh

pytestmark = needs_shared_memory

TIMEOUT = 3  # seconds; of a group whose ranks fail


@pytest.fixture
def run_to_death(run_apart):
    """Runs a function on ranks of which one is killed, and returns their errors."""

    def run(function, *args):
        with pytest.raises(AssertionError) as raised:
            run_apart(function, *args)
        return str(raised.value)

    return run


def _failing(what, how):
    """Takes a step, then lets rank 1 fail; returns the other rank's seconds and error."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    mesh = DeviceMesh.from_group(group, "cpu")
    model, reference = shard(Stack(), mesh=mesh, transport="shared_memory")
    run = compiled(model, how)
    batch = batch_of(4, 8)
    assert_same_step(model, reference, batch, run=run)
    if dist.get_rank() == 1:
        FAILURES[what](run, mine(batch))
        time.sleep(TIMEOUT + 2)  # alive, but elsewhere
        return None
    start = time.monotonic()
    try:
        for _ in range(2):
            run(mine(batch)).sum().backward()
    except RuntimeError as error:
        return time.monotonic() - start, str(error)
    raise AssertionError("nothing was raised")


def _never_comes(run, batch):
    pass


def _raises_before_backward(run, batch):
    run(batch)


def _raises_in_backward(run, batch):
    _fail_at(run.blocks[0])
    with pytest.raises(ZeroDivisionError):
        run(batch).sum().backward()


def _compute_in_a_child(holds):
    model, reference = shard(Stack(), transport="shared_memory")
    batch = batch_of(4, 8)
    if holds:  # all that a child needs to compute
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    assert_same_step(model, reference, batch)
    loss = mean_square(model, mine(batch))
    child = os.fork()
    if child == 0:
        refused = 0
        refusal = "was forked from rank"
        # A torch for GPUs refuses the backward by itself.
        for compute, expected in (
            (lambda: model(mine(batch)), refusal),
            (loss.backward, f"{refusal}|fork-based multiprocessing"),
        ):
            try:
                compute()
            except RuntimeError as error:
                refused += re.search(expected, str(error)) is not None
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    loss.backward()
    mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("holds", [False, True])
def test_a_child_that_was_forked_is_refused(run_apart, holds):
    run_apart(_compute_in_a_child, holds)


@contextlib.contextmanager
def _no_more_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/proc/self/stat", os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _wait_without_files():
    model, reference = shard(Stack(), transport="shared_memory")
    assert_same_step(model, reference, batch_of(4, 8))
    model.zero_grad()
    reference.zero_grad()
    with _no_more_files() if dist.get_rank() == 0 else contextlib.nullcontext():
        for _ in range(2):
            if dist.get_rank() == 1:
                time.sleep(0.5)  # the other rank checks several times whether this rank is alive
            mean_square(model, mine(batch_of(4, 8))).backward()
        mean_square(reference, batch_of(4, 8)).backward()
        mean_square(reference, batch_of(4, 8)).backward()
    assert_same_gradients(model, reference)


def test_a_rank_that_can_open_no_file_takes_nobody_for_dead(run_apart):
    run_apart(_wait_without_files)


def _fail_at(module):
    """Makes backwards raise at the output of ``module``."""

    def fail(grad):
        raise ZeroDivisionError

    def hook(module, args, output):
        output.register_hook(fail)

    return module.register_forward_hook(hook)


FAILURES = {
    "never comes": _never_comes,
    "raises before backward": _raises_before_backward,
    "raises in backward": _raises_in_backward,
}


@pytest.mark.parametrize(
    ("what", "missing", "how"),
    [
        ("never comes", "it has not begun to gather 'blocks.0", "interpreted"),
        ("raises before backward", "it has not begun a backward of the model of '", "eager"),
    ],
)
def test_a_rank_that_does_something_else_is_named_in_time(run_apart, what, missing, how):
    seconds, message = run_apart(_failing, what, how)[0]
    assert TIMEOUT <= seconds < TIMEOUT + 2
    assert f"waited {TIMEOUT} s for rank 1 (pid " in message
    assert ", sleeping): " + missing in message


def test_a_rank_whose_backward_raises_is_named_at_once(run_apart):
    seconds, message = run_apart(_failing, "raises in backward", "eager")[0]
    assert seconds < TIMEOUT
    assert "a backward has ended on rank 1 without a gradient of 'blocks.0." in message


def _step_after_failures(how):
    """Makes backwards raise at different places on each rank; checks the next step."""
    model, reference = shard(Stack())
    run = compiled(model, how)
    batch = batch_of(4, 8)
    assert_same_step(model, reference, batch, run=run)
    for attempt in range(3):
        hook = _fail_at(model.head if dist.get_rank() == attempt % 2 else model.blocks[0])
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            mean_square(model, mine(batch)).backward()
        hook.remove()
        model.zero_grad()
        reference.zero_grad()
        assert_same_step(model, reference, batch, run=run)


@each_way
def test_the_step_after_backwards_that_raised_is_right(run_ranks, how):
    run_ranks(2, _step_after_failures, how)


def _killed(signal_number, delay, how):
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT if delay is None else 60))
    model, _ = shard(Stack(), mesh=DeviceMesh.from_group(group, "cpu"))
    run = compiled(model, how)
    batch = mine(batch_of(4, 8))
    run(batch).sum().backward()
    if dist.get_rank() == 1:
        threading.Timer(delay or 0.0, os.kill, (os.getpid(), signal_number)).start()
    start = time.monotonic()
    try:
        for _ in range(1_000_000):
            run(batch).sum().backward()
    except RuntimeError as error:
        raise RuntimeError(f"after {time.monotonic() - start:.1f} s: {error}") from None


# Times at which a gather, a sum or a wait may be running.
@pytest.mark.parametrize(
    ("how", "delay"),
    [
        ("interpreted", 0.05),
        ("eager", 0.05),
        ("eager", 0.12),
        pytest.param("zero3", 0.05, marks=INDUCTOR_TOO),
    ],
)
def test_a_rank_that_is_killed_is_named_at_once(run_to_death, how, delay):
    message = run_to_death(_killed, signal.SIGKILL, delay, how)
    assert "rank 1 died with exit code -9" in message
    assert "zero3: cannot go on without rank 1 (pid " in message
    assert ", dead): it has not " in message


def test_a_rank_that_is_stopped_is_named_in_time(run_to_death):
    message = run_to_death(_killed, signal.SIGSTOP, None, "eager")
    assert f"zero3: waited {TIMEOUT} s for rank 1 (pid " in message
    assert ", stopped): it has not " in message
