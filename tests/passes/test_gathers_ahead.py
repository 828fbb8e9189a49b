"""The option ``gathers_ahead``: more gathers are in flight, and no number changes."""

import pytest
import torch
from support.models import (
    Stack,
    assert_same_step,
    batch_of,
    compiled,
    compiled_each_way,
    either_transport,
    mean_square,
    optimizers_of,
    shard,
)

from deepcompile_zero3 import capture_graphs


def _steps(how, transport, ahead, regions):
    model = Stack(width=16, depth=4)
    model, reference = shard(model, model.blocks, transport=transport)
    options = {"gathers_ahead": ahead, "gather_bucket_mb": 1e-3, "keep_mb": 0, "regions": regions}
    run = compiled(model, how, **options)
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        batch = batch_of(8, 16, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@pytest.mark.thin
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("ahead", [2, 5, 100])
@either_transport
@compiled_each_way
def test_steps_are_those_of_one_process(run_ranks, how, transport, ahead, regions):
    run_ranks(2, _steps, how, transport, ahead, regions)


def _most_gathered(ahead):
    torch.compiler.reset()
    model = Stack(width=16, depth=4)
    model, _ = shard(model, model.blocks, transport="c10d")
    options = {"gathers_ahead": ahead, "gather_bucket_mb": 1e-3, "keep_mb": 0, "inductor": False}
    with capture_graphs() as graphs:
        mean_square(
            torch.compile(model, backend="zero3", options=options), batch_of(2, 16)
        ).backward()
    return max(graph.gathered_peak for graph in (*graphs.forward, *graphs.backward))


def _memory():
    return [_most_gathered(ahead) for ahead in (1, 2, 100)]


def test_one_more_bucket_is_alive_for_each(run_ranks):
    for one, two, all_of_them in run_ranks(2, _memory):
        assert one < two < all_of_them
