"""Processes outside of the job that receive streams, leave or die: the ranks say so, and go on."""

import contextlib
import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.models import either_transport
from support.streams import SMALL, Fault, full_values, sharded_stack

from deepcompile_zero3 import (
    SharedMemoryReceiver,
    SharedMemorySender,
    Zero3Error,
    stream_full_parameters,
)
from deepcompile_zero3.features.streaming import receiver as protocol


def _receive(name, pipe, leaves_at, kills_itself):
    with SharedMemoryReceiver(name, timeout=60) as receiver:
        pipe.send("ready")
        for _ in range(2):  # streams
            received = {}
            try:
                for index, (each, tensor) in enumerate(receiver):
                    received[each] = tensor.clone()
                    if index == leaves_at:
                        if kills_itself:
                            os.kill(os.getpid(), signal.SIGKILL)
                        break
            except Zero3Error as error:
                pipe.send(str(error))
                return
            pipe.send({each: tensor.tolist() for each, tensor in received.items()})


def _receiver(name, leaves_at=-1, kills_itself=False):
    """A process outside of the job that receives two streams."""
    return _process(_receive, name, leaves_at, kills_itself)


@contextlib.contextmanager
def _process(target, name, *arguments):
    """A process that says when its receiver listens. Yields its pipe."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(name, theirs, *arguments))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _to_a_receiver(name, transport):
    model = sharded_stack()
    for factor in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        to = SharedMemorySender(name, timeout=30)
        for _, tensor in stream_full_parameters(model, max_mb=SMALL, to=to, transport=transport):
            assert tensor is None
    return {each: tensor.tolist() for each, tensor in full_values(model).items()}


@either_transport
def test_a_process_outside_of_the_job_receives_streams(run_ranks, tmp_path, transport):
    name = str(tmp_path)
    with _receiver(name) as pipe:
        expected = run_ranks(2, _to_a_receiver, name, transport)[0]
        first, second = pipe.recv(), pipe.recv()
    assert second == expected
    assert list(first) == list(expected)


def _to_a_receiver_that_leaves(name, transport, timeout):
    model = sharded_stack()
    to = SharedMemorySender(name, timeout=timeout)
    start = time.monotonic()
    with pytest.raises(
        Zero3Error, match=r"rank 0.*the receiver .* at the parameters from|has left"
    ):
        for _ in stream_full_parameters(model, max_mb=SMALL, to=to, transport=transport):
            pass
    assert time.monotonic() - start < 20
    dist.barrier()


@pytest.mark.thin
@either_transport
@pytest.mark.parametrize(
    "leaves_at",
    [
        0,
        pytest.param(6, marks=pytest.mark.more),
        *(pytest.param(each, marks=pytest.mark.long) for each in (1, 3, 5, 8, 10, 13)),
    ],
)
@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.more)])
def test_a_receiver_that_leaves_or_is_killed_is_an_error_on_all_ranks(
    run_ranks, tmp_path, transport, leaves_at, is_killed
):
    name = str(tmp_path)
    with _receiver(name, leaves_at, is_killed):
        run_ranks(2, _to_a_receiver_that_leaves, name, transport, 30)


def _without_a_receiver(name):
    with pytest.raises(Zero3Error, match=r"there is no receiver .* in 0\.1 s"):
        next(stream_full_parameters(sharded_stack(), to=SharedMemorySender(name, timeout=0.1)))


def test_a_receiver_that_does_not_exist_is_an_error_on_all_ranks(run_ranks, tmp_path):
    run_ranks(2, _without_a_receiver, str(tmp_path))


def _that_listens_only(name):
    receiver = SharedMemoryReceiver(name) if dist.get_rank() == 1 else None
    dist.barrier()
    with pytest.raises(Zero3Error, match=r"the receiver .* has not taken it in 0\.5 s"):
        for _ in stream_full_parameters(sharded_stack(), to=SharedMemorySender(name, timeout=0.5)):
            pass
    if receiver is not None:
        receiver.close()


def test_a_receiver_that_hangs_is_an_error_on_all_ranks(run_ranks, tmp_path):
    run_ranks(2, _that_listens_only, str(tmp_path))


def _takes_one_bucket(name, pipe):
    """Answers to the first bucket, and takes no other. It keeps a tensor of the first."""
    with SharedMemoryReceiver(name) as receiver:
        pipe.send("ready")
        connection, _ = receiver._socket.accept()
        message, _ = protocol._receive(connection)
        connection.shutdown(socket.SHUT_RD)
        protocol._send(connection, {"held": [message["segment"]]})
        pipe.recv()


def _to_one_that_leaves_between_buckets(name, transport):
    model = sharded_stack()
    group = dist.new_group(timeout=timedelta(seconds=8))
    to = SharedMemorySender(name)
    start = time.monotonic()
    with pytest.raises(Zero3Error, match=r"the receiver .* has left or died .* from 'blocks\.0"):
        for _ in stream_full_parameters(
            model, max_mb=SMALL, to=to, transport=transport, group=group
        ):
            pass
    assert time.monotonic() - start < 4
    dist.barrier()


@either_transport
def test_a_receiver_that_leaves_between_buckets_is_an_error_on_all_ranks_at_once(
    run_ranks, tmp_path, transport
):
    name = str(tmp_path)
    with _process(_takes_one_bucket, name):
        run_ranks(2, _to_one_that_leaves_between_buckets, name, transport)


def _one_does_not_begin(name, transport):
    group = dist.new_group(timeout=timedelta(seconds=8))
    arguments = {"to": SharedMemorySender(name), "transport": transport, "group": group}
    model = sharded_stack()
    start = time.monotonic()
    if dist.get_rank() == 1:
        stream_full_parameters(model, **arguments)
    else:
        message = "rank 1: its consumer left the loop, or raised, at its beginning"
        with pytest.raises(Zero3Error, match=message):
            next(stream_full_parameters(model, **arguments))
    assert time.monotonic() - start < 4


@either_transport
def test_a_rank_that_does_not_begin_to_iterate_is_named_before_the_receiver_is_asked(
    run_ranks, tmp_path, transport
):
    with _receiver(str(tmp_path)):
        run_ranks(2, _one_does_not_begin, str(tmp_path), transport)


def _left_at(name, position):
    model = sharded_stack()
    to = SharedMemorySender(name)
    who = pytest.raises(Fault) if dist.get_rank() == 1 else pytest.raises(Zero3Error)
    with who:
        for index, _ in enumerate(stream_full_parameters(model, max_mb=SMALL, to=to)):
            if index == position and dist.get_rank() == 1:
                raise Fault("a rank")


def test_a_receiver_is_told_that_a_rank_has_raised(run_ranks, tmp_path):
    with _receiver(str(tmp_path)) as pipe:
        run_ranks(2, _left_at, str(tmp_path), 4)
        assert "rank 1: its consumer left the loop, or raised, at 'blocks.0." in pipe.recv()


def _killed_while_it_sends(name):
    to = SharedMemorySender(name)
    for index, _ in enumerate(stream_full_parameters(sharded_stack(), max_mb=SMALL, to=to)):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.more
def test_a_receiver_is_told_that_the_ranks_have_died(run_apart, tmp_path):
    with _receiver(str(tmp_path)) as pipe:
        with pytest.raises(AssertionError, match="died"):
            run_apart(_killed_while_it_sends, str(tmp_path))
        assert "the ranks died, raised or take longer" in pipe.recv()


def test_a_name_has_one_receiver(tmp_path):
    with (
        SharedMemoryReceiver(str(tmp_path)),
        pytest.raises(Zero3Error, match="exists already: give each another name"),
    ):
        SharedMemoryReceiver(str(tmp_path))
    with pytest.raises(ValueError, match=r"the name 'n+' of a receiver is \d+ bytes too long"):
        SharedMemoryReceiver("n" * 108)
    with (
        SharedMemoryReceiver(str(tmp_path), timeout=0.1) as receiver,
        pytest.raises(Zero3Error, match=r"no stream has come .* in 0\.1 s"),
    ):
        next(iter(receiver))
