"""What a ``FileOffloadPolicy`` moves, in which order, and what a plan and graphs tell of it."""

import re

import pytest
import torch
from support.models import Stack, batch_of, compiled, either_transport, mean_square
from support.offloading import DEPTH, ROWS, WIDTH, shard, tensors_of, train

from deepcompile_zero3 import FileOffloadPolicy, capture_graphs, fully_shard, plan
from deepcompile_zero3.runtime import _C


def _kinds_in_file(folder, budget_mb):
    """Returns how many activations a forward stores, and how many shards and states are stored."""
    policy = FileOffloadPolicy(folder, budget_mb)
    with capture_graphs() as graphs:
        model, optimizer, _ = train(policy, "interpreted", steps=1)
    shards, states = tensors_of(model, optimizer)
    [forward] = graphs.forward
    stored = forward.text.count("zero3.store_start")
    assert stored == graphs.backward[0].text.count("zero3.load_start")
    return stored, *(sum(map(_C.is_in_file, tensors)) for tensors in (shards, states))


def test_the_cheapest_goes_first(run_ranks, tmp_path):
    def kinds(budget_mb):
        return run_ranks(2, _kinds_in_file, str(tmp_path), budget_mb)[0]

    # Of each rank: buckets and what comes back of 16.4 MiB, shards and gradients of 1.6 MiB each,
    # states of 3.3 MiB, and saved activations of 4.5 MiB at least.
    assert kinds(37) == (0, 0, 0)
    some, *others = kinds(25)
    assert some > 0
    assert others == [0, 0]
    most, shards, states = kinds(21)
    assert most > some
    assert shards == 0
    assert states > 0
    every, shards, more_states = kinds(0)
    assert every == most
    assert shards > 0
    assert more_states > states


def _moved_by_a_step(folder, budget_mb):
    """Returns the bytes that the last of some steps wrote and read."""
    policy = FileOffloadPolicy(folder, budget_mb)
    found = []
    for steps in (2, 3):
        policy = FileOffloadPolicy(folder, budget_mb)
        train(policy, "interpreted", steps, transport="c10d")
        found.append(policy.stats())
    return found[1].written - found[0].written, found[1].read - found[0].read


@pytest.mark.parametrize(
    "budget_mb",
    [pytest.param(0, marks=pytest.mark.long), 21, pytest.param(25, marks=pytest.mark.long)],
)
def test_a_plan_tells_what_is_moved(run_ranks, tmp_path, budget_mb):
    def sharded(model, mesh):
        policy = FileOffloadPolicy(tmp_path, budget_mb)
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh, offload_policy=policy)

    planned = plan(
        lambda: Stack(width=WIDTH, depth=DEPTH),
        {"x": torch.zeros(ROWS, WIDTH)},
        world_size=2,
        shard=sharded,
        options={"keep_mb": 0, "inductor": False},
        advise=False,
    )
    written, read = run_ranks(2, _moved_by_a_step, str(tmp_path), budget_mb)[0]
    assert written == pytest.approx(planned.moved.out, rel=0.05)
    assert read == pytest.approx(planned.moved.back, rel=0.05)


def _starts_before_waits(text):
    """Returns how many loads have started, at most, before one of them is waited for."""
    started, most = 0, 0
    for line in text.splitlines():
        started += "zero3.load_start" in line
        started -= "zero3.load_wait" in line
        most = max(most, started)
    return most


@either_transport
def test_graphs_that_offload(run_ranks, tmp_path, transport):
    for forward, backward in run_ranks(2, _graphs, str(tmp_path), transport):
        assert _starts_before_waits(backward) > 1
        starts = re.findall(r"(\w+): .* = zero3.store_start\(", forward)
        waits = re.findall(r"zero3.store_wait\((\w+), \w+(?:, (\w+))?\)", forward)
        assert len(starts) == len(waits) > 4
        for start, later in waits:  # two more have started before one is waited for
            expected = min(starts.index(start) + 2, len(starts) - 1)
            assert later == (starts[expected] if starts[expected] != start else "")


def _graphs(folder, transport):
    model = shard(FileOffloadPolicy(folder), transport=transport)
    with capture_graphs() as graphs:
        mean_square(compiled(model, "interpreted"), batch_of(ROWS, WIDTH)).backward()
    return graphs.forward[0].text, graphs.backward[0].text
