"""Streams use memory again, except that in which somebody keeps tensors."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
from support.models import shard
from support.streams import SMALL, full_values, sharded_stack
from torch import nn

from deepcompile_zero3 import (
    SharedMemoryReceiver,
    SharedMemorySender,
    Zero3Error,
    release_buffers,
    stream_full_parameters,
)
from deepcompile_zero3.features.streaming import host_memory, segments
from deepcompile_zero3.features.streaming.segments import Segments
from deepcompile_zero3.transport import shared_files


def _double(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def _stream(model, **arguments):
    return stream_full_parameters(model, max_mb=SMALL, transport="shared_memory", **arguments)


def _count_segments(monkeypatch):
    """Returns a list that grows with each new segment of this process."""
    made, share = [], segments.share

    def counts(*args):
        made.append(args)
        return share(*args)

    monkeypatch.setattr(segments, "share", counts)
    return made


def _consumer_keeps(every, by_rank):
    model = sharded_stack()
    keeps = every if not by_rank or dist.get_rank() == 1 else 10**9
    kept = []
    for _ in range(3):
        expected = full_values(model)
        for index, (name, tensor) in enumerate(_stream(model)):
            assert torch.equal(tensor, expected[name])
            if index % keeps == 0:
                kept.append((tensor, expected[name]))
        _double(model)
        for tensor, value in kept:
            assert torch.equal(tensor, value)


@pytest.mark.parametrize(("every", "by_rank"), [(1, False), (3, False), (2, True)])
def test_tensors_that_a_consumer_keeps_stay_as_they_are(run_ranks, every, by_rank):
    run_ranks(2, _consumer_keeps, every, by_rank)


def _numbers_of_segments(rows, window):
    """Returns how many segments there have been after each of three streams.

    The consumer works on ``window`` tensors at once.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = _count_segments(monkeypatch)
        model = shard(nn.Sequential(*(nn.Linear(8, each, bias=False) for each in rows)))[0]
        numbers = []
        for _ in range(3):
            expected = full_values(model)
            latest = []
            for name, tensor in _stream(model):
                latest = [*latest[1 - window :], tensor] if window > 1 else []
                assert torch.equal(tensor, expected[name])
                del tensor
            del latest
            numbers.append(len(made))
            _double(model)
    return numbers


@pytest.mark.parametrize(
    "rows",
    [
        [8] * 20,
        [8, 2, 2, 8, 22, 22, 22, 1] * 4,  # as of Llama; the largest takes more than max_mb
        [*[8, 24] * 8, 100],
    ],
)
def test_streams_use_three_segments_again_whatever_sizes_tensors_have(run_ranks, rows):
    first, second, third = run_ranks(2, _numbers_of_segments, rows, 1)[0]
    assert first == second == third <= 3


def test_a_consumer_of_several_tensors_at_once_takes_a_segment_for_each(run_ranks):
    numbers = run_ranks(2, _numbers_of_segments, [8] * 20, 4)[0]
    assert 4 < numbers[0] <= numbers[-1] <= 3 + 4


def test_a_segment_with_more_pages_than_a_stream_may_take_is_freed():
    memory = Segments("a test", None)
    memory.take(1 << 20, set(), largest=1 << 20)  # of an earlier stream
    for _ in range(3):
        memory.take(4096, set(), largest=4096, most_bytes=2 * 4096)
        assert memory.nbytes <= 2 * 4096


def _one_rank_releases():
    model = sharded_stack()
    for rank in (0, 1):
        expected = full_values(model)
        for name, tensor in _stream(model):
            assert torch.equal(tensor, expected[name])
        if dist.get_rank() == rank:
            assert release_buffers() > 0
        _double(model)


def test_a_rank_may_release_buffers_between_streams(run_ranks):
    run_ranks(2, _one_rank_releases)


def _group_ends():
    model = sharded_stack()
    group = dist.new_group()
    for _ in _stream(model, group=group):
        pass
    assert host_memory._kept[group].segments.nbytes > 0
    dist.destroy_process_group(group)
    for _ in _stream(model):
        pass
    assert list(host_memory._kept) == [dist.group.WORLD]


def test_memory_of_a_group_is_freed_with_it(run_ranks):
    run_ranks(2, _group_ends)


def _built_apart():
    model = sharded_stack()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_files, "_build", lambda: str(dist.get_rank()))
        with pytest.raises(Zero3Error, match=r"'shared_memory' is not possible: .*several builds"):
            _stream(model)


def test_ranks_of_two_builds_do_not_stream_through_shared_memory(run_ranks):
    run_ranks(2, _built_apart)


def _two_at_once():
    model = sharded_stack()
    expected = full_values(model)
    for _ in _stream(model):
        pass
    for (name, one), (_, other) in zip(_stream(model), _stream(model), strict=True):
        assert torch.equal(one, expected[name])
        assert torch.equal(other, expected[name])
        assert one.data_ptr() != other.data_ptr()


def test_two_streams_at_once_have_memory_of_their_own(run_ranks):
    run_ranks(2, _two_at_once)


def _keeps_all_tensors(name, pipe):
    with SharedMemoryReceiver(name, timeout=60) as receiver:
        pipe.send("ready")
        streams = [dict(receiver) for _ in range(3)]
        pipe.send([{each: tensor.tolist() for each, tensor in kept.items()} for kept in streams])


def _three_streams_outside(name):
    model = sharded_stack()
    expected = []
    for _ in range(3):
        expected.append({each: tensor.tolist() for each, tensor in full_values(model).items()})
        for _ in _stream(model, to=SharedMemorySender(name, timeout=30)):
            pass
        _double(model)
    return expected


def test_tensors_that_a_receiver_keeps_stay_as_they_are(run_ranks, tmp_path):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_keeps_all_tensors, args=(str(tmp_path), theirs))
    process.start()
    try:
        assert ours.recv() == "ready"
        expected = run_ranks(2, _three_streams_outside, str(tmp_path))[0]
        assert ours.recv() == expected
    finally:
        process.kill()
        process.join()


def test_the_longest_held_of_64_segments_leaves_for_a_new_one():
    memory = Segments("a test", None)
    kept = []
    for value in range(70):
        number = memory.take(64, memory.held, 64)
        tensor = torch.frombuffer(memory[number].lease(), dtype=torch.uint8)
        kept.append(tensor.fill_(value))
    assert memory.word_of(memory.held) == 2**64 - 1
    assert memory.numbers_in(2**64 - 1) == memory.held == {*range(6, 70)}
    assert [int(tensor[0]) for tensor in kept] == [*range(70)]
