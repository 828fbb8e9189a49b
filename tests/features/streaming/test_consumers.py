"""Ranks that leave a stream, raise or die in it: the others say so, and go on."""

import contextlib
import os
import signal
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import either_transport
from support.streams import SMALL, Fault, full_values, sharded_stack

from deepcompile_zero3 import Zero3Error, stream_full_parameters
from deepcompile_zero3.features.streaming.carriers import BySharedMemory


def _leave(model, how, position, **arguments):
    """Consumes a stream as far as ``position``, and leaves it."""
    if how == "unused":
        stream_full_parameters(model, **arguments)
        return
    for index, _ in enumerate(stream_full_parameters(model, **arguments)):
        if index == position:
            if how == "raise":
                raise Fault("out of memory")
            break


def _one_leaves(transport, how, position):
    model = sharded_stack()
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == 14
    arguments = {"max_mb": SMALL, "transport": transport}
    for _ in stream_full_parameters(model, **arguments):  # leaves memory for the next
        pass
    if dist.get_rank() == 1:
        expected = pytest.raises(Fault) if how == "raise" else contextlib.nullcontext()
        with expected:
            _leave(model, how, position, **arguments)
    else:
        where = "its beginning" if how == "unused" else f"'{names[position]}'"
        message = f"rank 1: its consumer left the loop, or raised, at {where}; read that rank's"
        with pytest.raises(Zero3Error, match=message):
            for _ in stream_full_parameters(model, **arguments):
                pass
    for name, tensor in stream_full_parameters(model, **arguments):  # ranks are in step again
        assert torch.equal(tensor, model.get_parameter(name).full_tensor())


@either_transport
@pytest.mark.parametrize(
    ("how", "position"),
    [
        ("break", 0),
        ("raise", 5),
        pytest.param("unused", 0, marks=pytest.mark.more),
        pytest.param("raise", 0, marks=pytest.mark.more),
        pytest.param("break", 6, marks=pytest.mark.more),
        pytest.param("break", 13, marks=pytest.mark.more),
    ],
)
def test_a_rank_that_leaves_is_named_on_the_others(run_ranks, transport, how, position):
    run_ranks(2, _one_leaves, transport, how, position)


def _keeps_the_stream():
    model = sharded_stack()
    group = dist.new_group(timeout=timedelta(seconds=2))
    stream = stream_full_parameters(model, max_mb=SMALL, group=group)
    next(stream)
    if dist.get_rank() == 1:
        return stream.close  # and does not iterate, as one that keeps the traceback of an error
    message = r"ended before 'blocks\.0\.[a-z.]*': .* waited 2 s for rank 1 .* a with block"
    with pytest.raises(Zero3Error, match=message):
        list(stream)


def _keeps_it_to_the_end():
    close = _keeps_the_stream()
    dist.barrier()
    del close


@pytest.mark.more
def test_a_rank_that_does_not_iterate_is_waited_for_as_long_as_the_group_says(run_apart):
    run_apart(_keeps_it_to_the_end)


def _all_leave():
    model = sharded_stack()
    for _ in range(3):
        for _, _ in stream_full_parameters(model, max_mb=SMALL):
            break
    with stream_full_parameters(model, max_mb=SMALL) as stream:
        kept = [next(stream), next(stream)]
    with pytest.raises(StopIteration):
        next(stream)
    for name, tensor in kept:
        assert torch.equal(tensor, model.get_parameter(name).full_tensor())


def test_all_ranks_may_leave_together(run_ranks):
    run_ranks(2, _all_leave)


def _is_interrupted():
    model = sharded_stack()
    expected = full_values(model)
    group = dist.new_group(timeout=timedelta(seconds=8))
    stream = stream_full_parameters(model, max_mb=SMALL, group=group, transport="shared_memory")
    start = time.monotonic()
    if dist.get_rank() == 1:
        interruption = mock.patch.object(BySharedMemory, "finish", side_effect=KeyboardInterrupt)
        with interruption, pytest.raises(KeyboardInterrupt):
            next(stream)
    else:
        name, tensor = next(stream)
        with pytest.raises(Zero3Error, match="rank 1: KeyboardInterrupt"):
            list(stream)
        assert torch.equal(tensor, expected[name])
    assert time.monotonic() - start < 4


def test_a_rank_that_is_interrupted_in_a_stream_is_named_at_once(run_ranks):
    run_ranks(2, _is_interrupted)


def _forks_in_the_loop(transport):
    model = sharded_stack()
    expected = full_values(model)
    stream = stream_full_parameters(model, max_mb=SMALL, transport=transport)
    next(stream)
    child = os.fork()
    if child == 0:
        del stream  # as its parent's would, it ends with its last reference
        os._exit(0)
    deadline = time.monotonic() + 3
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended, "the child takes part in the stream"
    for name, tensor in stream:
        assert torch.equal(tensor, expected[name])


@either_transport
def test_a_child_that_is_forked_in_the_loop_leaves_the_stream_to_its_parent(run_ranks, transport):
    run_ranks(2, _forks_in_the_loop, transport)


def _raises_in_a_block():
    model = sharded_stack()
    who = pytest.raises(Fault) if dist.get_rank() == 0 else pytest.raises(Zero3Error)
    with who as caught, stream_full_parameters(model, max_mb=SMALL, to=0) as stream:
        for name, _ in stream:
            if dist.get_rank() == 0 and name == "blocks.1.up.weight":
                raise Fault("out of memory")
    if dist.get_rank() == 1:
        assert "rank 0: its consumer raised at 'blocks.1.up.weight': Fault: out of" in str(
            caught.value
        )


def test_a_block_tells_the_others_what_the_consumer_raised(run_ranks):
    run_ranks(2, _raises_in_a_block)


def _one_dies(transport, position, folder):
    model = sharded_stack()
    for _ in stream_full_parameters(model, max_mb=SMALL, transport=transport):
        pass
    for index, _ in enumerate(stream_full_parameters(model, max_mb=SMALL, transport=transport)):
        if index == position and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(os.path.join(folder, str(dist.get_rank())), "w") as file:
            file.write(str(index))


@either_transport
@pytest.mark.parametrize(
    "position",
    [
        0,
        pytest.param(7, marks=pytest.mark.more),
        *(pytest.param(each, marks=pytest.mark.long) for each in (1, 3, 5, 9, 11, 13)),
    ],
)
def test_a_rank_that_is_killed_ends_the_stream_on_the_others(
    run_apart, tmp_path, transport, position
):
    with pytest.raises(AssertionError, match="rank 1 died") as failed:
        run_apart(_one_dies, transport, position, str(tmp_path))
    other = "cannot go on without rank 1" if transport == "shared_memory" else "ended"
    assert "could not tell each other" in str(failed.value) or other in str(failed.value)
    assert "killed after" not in str(failed.value)
