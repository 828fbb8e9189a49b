"""With ZERO3_DEBUG=1, buffers are NaN until they are written, and results are unchanged."""

import ctypes

import pytest
import torch
from support.models import (
    Stack,
    assert_same_gradients,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    shard,
)
from support.ranks import RankPool
from torch import fx, nn

from deepcompile_zero3 import _C, fully_shard
from deepcompile_zero3.graph.calls import copied

KEPT = 64 << 10  # bytes; buffers of this size and more are reused


@pytest.fixture(scope="module")
def debug_pool():
    pool = RankPool(2, ZERO3_DEBUG="1")
    yield pool
    pool.close()


def _buffers():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for rows in (1, 3, KEPT):
            buffer = _C.empty_buffer([rows, 4], dtype)
            assert buffer.isnan().all()
            buffer.fill_(1)
            memory = (ctypes.c_ubyte * buffer.nbytes).from_address(buffer.data_ptr())
            del buffer
            if len(memory) >= KEPT:  # smaller buffers are not kept
                assert bytes(memory) == b"\xff" * len(memory)


def test_unwritten_memory_is_nan(debug_pool):
    debug_pool.run(_buffers)


def _steps(how, transport, width):
    """Returns this rank's gradients of two steps."""
    torch.manual_seed(0)
    model, reference = shard(Stack(width), transport=transport, reshard_after_forward=True)
    run = compiled(model, how)
    gradients = []
    for seed in range(2):
        batch = batch_of(4, width, seed=seed)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        assert_same_gradients(model, reference)
        gradients += [parameter.grad.to_local().clone() for parameter in model.parameters()]
    return gradients


@pytest.mark.thin
@pytest.mark.parametrize("width", [7, 256])  # sent together, and alone
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@each_way
def test_results_are_the_same(run_ranks, debug_pool, how, transport, width):
    ours = debug_pool.run(_steps, how, transport, width)
    theirs = run_ranks(2, _steps, how, transport, width)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _lost(transport):
    """Returns how much of a gathered weight is NaN if it is read too late."""
    model = fully_shard(nn.Linear(256, 256), transport=transport)
    model.unshard()
    weight = model.weight
    memory = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    del weight
    model.reshard()
    return torch.frombuffer(memory, dtype=torch.float32).isnan().float().mean().item()


def test_a_weight_that_was_freed_is_nan(debug_pool):
    assert debug_pool.run(_lost, "c10d") == [1, 1]


def test_a_copy_of_a_graph_shares_no_graph_that_it_calls():
    inner = fx.symbolic_trace(nn.ReLU())
    graph = fx.Graph()
    body = graph.get_attr("body")
    graph.output(graph.call_function(print, (body,)))
    outer = fx.GraphModule({"body": inner}, graph)

    copy = copied(outer)

    assert isinstance(copy.body, fx.GraphModule)
    assert copy.body is not inner
    assert copy.body.graph is not inner.graph
