"""Any order of a graph's nodes by a scheduler is correct, even if each rank has its own."""

import random
import re

import pytest
import torch
import torch._inductor.memory
from support.models import assert_same_gradients, batch_of, mean_square, mine, shard
from torch import nn
from torch._inductor.utils import run_and_get_code

from deepcompile_zero3 import record_collectives


class _Dropped(nn.Module):
    """A model of products, an embedding, dropout and indexing: many kernels between gathers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(600, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.wide = nn.Linear(64, 300)
        self.narrow = nn.Linear(300, 64, bias=False)

    def forward(self, x):
        rows = x.abs().mul(100).long()
        hidden = self.embedding(rows).mean(1)
        for layer in self.layers:
            hidden = hidden + nn.functional.dropout(torch.tanh(layer(hidden)), 1e-9)
        hidden = hidden * (1 + hidden.argmax(-1, keepdim=True) / 64)
        return self.narrow(torch.nn.functional.gelu(self.wide(hidden)))


def _in_random_order(seed):
    """Replaces Inductor's reordering for memory by a random order."""
    generator = random.Random(seed)

    def reorder(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs):
        torch._inductor.memory.prepare_planning_info(
            nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs
        )
        waiting = {node: set(node.mpi_node.pred_nodes) for node in nodes}
        order = []
        while waiting:
            ready = [node for node, before in waiting.items() if not before]
            node = generator.choice(ready)
            del waiting[node]
            for before in waiting.values():
                before.discard(node)
            order.append(node)
        return order

    return reorder


def _gathers(code):
    """Returns numbers of starts (positive) and waits (negative) in the order of a graph's code."""
    ops = re.findall(r"zero3\.all_gather_(start|wait|views)\.default\(", code)
    counts = {"start": 0, "wait": 0}
    order = []
    for op in ops:
        kind = "start" if op == "start" else "wait"
        counts[kind] += 1
        order.append(counts[kind] if kind == "start" else -counts[kind])
    return order


def _train(order):
    import torch.distributed as dist

    model, reference = shard(_Dropped().double())
    config = {"force_disable_caches": True}
    run = torch.compile(
        model,
        backend="zero3",
        options={"keep_mb": 0, "gather_bucket_mb": 0.1, "inductor_config": config},
    )
    patch = pytest.MonkeyPatch()
    if order == "random":
        reorder = _in_random_order(dist.get_rank())
        patch.setattr(torch._inductor.memory, "reorder_for_peak_memory", reorder)
    batch = batch_of(8, 3, seed=1).clamp(-5, 5).double()

    def step():
        with record_collectives() as log:
            mean_square(run, mine(batch)).backward()
        return [(c.op, c.params) for c in log]

    try:
        first, codes = run_and_get_code(step)
    finally:
        patch.undo()
    second = step()
    for _ in range(2):
        mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    kinds = ("all_gather", "reduce_scatter")
    assert len({str([c for c in log if c[0] == k]) for log in (first, second) for k in kinds}) == 2
    return [_gathers(code) for code in codes], [[c for c in first if c[0] == k] for k in kinds]


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("order", ["inductor", pytest.param("random", marks=pytest.mark.long)])
def test_gathers_start_one_bucket_ahead_in_any_order_of_other_nodes(run_ranks, order):
    (codes, collectives), (_, others) = run_ranks(2, _train, order, timeout=300)
    assert collectives == others, "in one order on both ranks"
    assert max(len(code) for code in codes) >= 10, "many buckets"
    for code in codes:
        count = len(code) // 2
        expected = [1] if count else []
        for number in range(1, count + 1):
            expected += [number + 1, -number] if number < count else [-number]
        assert code == expected
