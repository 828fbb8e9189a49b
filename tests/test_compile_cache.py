"""Compiler caches on disk speed up a second process and never return a wrong graph."""

import time
from contextlib import closing

import pytest
import torch
from models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    mean_square,
    mine,
    shard,
)
from ranks import RankPool
from torch._dynamo.utils import counters


@pytest.fixture
def new_processes(tmp_path):
    """Runs ``new_processes(function, *args)`` on two new ranks; the cache lasts for the test."""

    def run(function, *args):
        with closing(RankPool(2, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))) as pool:
            return pool.run(function, *args)

    return run


def _first_step():
    """Returns seconds of a first step, its hits in the graph cache, and this rank's gradients."""
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks)
    run = compiled(model, "zero3")
    batch = batch_of(4, 8)
    start = time.perf_counter()
    mean_square(run, mine(batch)).backward()
    seconds = time.perf_counter() - start
    mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    gradients = [parameter.grad.to_local().tolist() for parameter in model.parameters()]
    return seconds, counters["inductor"]["fxgraph_cache_hit"], gradients


@pytest.mark.inductor
@pytest.mark.long
def test_a_second_process_compiles_faster_and_gets_the_same_bits(new_processes):
    cold = new_processes(_first_step)
    warm = new_processes(_first_step)
    for (cold_seconds, _, cold_gradients), (warm_seconds, hits, warm_gradients) in zip(
        cold, warm, strict=True
    ):
        assert warm_gradients == cold_gradients
        assert hits == 2, "forward and backward"
        assert warm_seconds < cold_seconds


def _alternately_sharded():
    """Alternates between a sharded and a plain model: the passes start from the same graph."""
    for how in ("zero3", "inductor", "zero3"):
        whole = Stack(depth=1)
        run = torch.compile(whole)
        mean_square(run, batch_of(2, 8)).backward()
        expected = [parameter.grad for parameter in whole.parameters()]
        whole.zero_grad()
        mean_square(whole, batch_of(2, 8)).backward()
        for parameter, gradient in zip(whole.parameters(), expected, strict=True):
            torch.testing.assert_close(gradient, parameter.grad)

        model, reference = shard(Stack(depth=1))
        assert_same_step(model, reference, batch_of(4, 8), run=compiled(model, how))


@pytest.mark.inductor
def test_a_graph_compiled_for_a_whole_model_is_never_run_for_a_sharded_one(run_ranks):
    for _ in range(2):  # the second time with everything in the cache
        run_ranks(2, _alternately_sharded)


def _dtype_of_gradients(grad_dtype):
    """Returns a gradient's dtype; runs differ in the parameter's contract only."""
    model = torch.nn.Linear(8, 8).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = grad_dtype
    model, _ = shard(model)
    mean_square(compiled(model, "zero3"), batch_of(2, 8).bfloat16()).backward()
    return {parameter.grad.dtype for parameter in model.parameters()}


@pytest.mark.inductor
def test_a_graph_compiled_for_other_gradient_dtypes_is_never_run(run_ranks):
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        assert run_ranks(2, _dtype_of_gradients, dtype) == [{dtype}] * 2
