"""Regions reduce the gradients of their calls, as Inductor gets them."""

import itertools
import operator

import pytest
import torch
from support.models import Block, shard
from torch import nn

from deepcompile_zero3 import MixedPrecisionPolicy, capture_graphs
from deepcompile_zero3.features.regions import reductions
from deepcompile_zero3.features.regions.reductions import reduce_in_regions
from deepcompile_zero3.graph.calls import calls_by_region, inlined
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.runtime import REDUCTIONS, ops

WIDTH = 160  # 100 KiB a matrix: their products are computed where they are sent from


class _Model(nn.Module):
    def __init__(self, depth, *, embeds=True, adds_after=None):
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH) if embeds else nn.Identity()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.adds_after = adds_after
        if adds_after is not None:
            self.added = nn.Parameter(torch.zeros(2, WIDTH))

    def forward(self, x):
        h = self.embedding(x)
        for position, block in enumerate(self.blocks):
            h = block(h)
            if position == self.adds_after:
                h = h + self.added
        return h


class _WithDeadCalls(nn.Module):
    """Backward reads nothing of what regions of the first blocks return: products leave them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Identity()
        projections = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(3))
        self.blocks = nn.ModuleList([*projections, *(Block(WIDTH) for _ in range(3))])

    def forward(self, x):
        h = sum(torch.relu(block(x.detach() * 2)) for block in self.blocks[:3])
        for block in self.blocks[3:]:
            h = block(h)
        return h


def _backward(model):
    """Returns the rewritten backward graph of a sharded model."""
    with capture_graphs() as graphs:
        _step(model, inductor=False, regions=True)
    return graphs.backward[0].graph_module


def _step(model, **options):
    torch._dynamo.reset()
    x = torch.randn(2, WIDTH, requires_grad=True)
    if isinstance(model.embedding, nn.Embedding):
        x = torch.arange(2)
    torch.compile(model, backend="zero3", options=options)(x).square().sum().backward()


def _sharded(model, **settings):
    return shard(model, model.blocks, **settings)[0]


def _reductions(graph):
    return [node for node in graph.nodes if node.target in REDUCTIONS]


def _sent(gm):
    """Returns the reductions of a graph and of its regions, in their order."""
    whole = inlined(gm).graph
    whole.lint()
    reductions = _reductions(whole)
    for before, reduction in itertools.pairwise(reductions):
        assert reduction.args[2] is before
    return [(str(n.target), n.args[1].name, dict(n.kwargs)) for n in reductions]


@pytest.mark.parametrize("adds_after", [None, 0, 1, 2])
def test_a_call_takes_its_reductions_along(one_rank, adds_after):
    gm = _backward(_sharded(_Model(3, adds_after=adds_after)))
    expected, before = _sent(gm), len(gm.graph.nodes)
    of_others = 1 if adds_after is None else 2
    assert len(expected) == len(_reductions(gm.graph)) == 3 * 6 + of_others
    assert {target for target, _, _ in expected} == {
        "zero3.reduce_mm.default",
        "zero3.reduce_grad.default",
    }
    reduce_in_regions(gm)
    assert len(_reductions(gm.graph)) == of_others
    assert len(gm.graph.nodes) < before - 3 * 12  # views, and what gets a result of a call
    assert _sent(gm) == expected


def test_what_waits_for_a_reduction_waits_for_its_call(one_rank):
    gm = _backward(_sharded(_Model(3)))
    reduction = _reductions(gm.graph)[2]
    with gm.graph.inserting_after(reduction):  # as the load of an activation does
        args = gm.graph.find_nodes(op="placeholder")[0], reduction
        reader = gm.graph.call_function(ops.load_start.default, args)
        reader.meta["val"] = torch.empty(1, dtype=torch.int64)
    gm.graph.output_node().args = ([reader],)
    reduce_in_regions(gm)
    gm.graph.lint()
    assert reader.args[1].target is operator.getitem  # of the call's results
    assert len(_reductions(gm.graph)) == 1


def test_calls_that_nothing_reads_are_left_out(one_rank):
    gm = _backward(_sharded(_WithDeadCalls()))
    assert any(not call.users for calls in calls_by_region(gm).values() for call in calls)
    expected = _sent(gm)
    reduce_in_regions(gm)
    assert len(_reductions(gm.graph)) == 3
    assert _sent(gm) == expected


def test_reductions_stay_where_nothing_reads_the_last_call(one_rank):
    gm = _backward(_sharded(_Model(3, embeds=False)))
    reduce_in_regions(gm)
    assert len(_reductions(gm.graph)) == 3 * 6


def test_reductions_stay_where_calls_differ_in_them(one_rank):
    gm = _backward(_sharded(_Model(3)))
    _reductions(gm.graph)[8].update_kwarg("contract", "bfloat16")
    expected = _sent(gm)
    reduce_in_regions(gm)
    assert len(_reductions(gm.graph)) == len(expected)
    assert _sent(gm) == expected


@pytest.mark.parametrize("position", [0, 2])
def test_reductions_stay_where_another_comes_in_between(one_rank, position):
    gm = _backward(_sharded(_Model(3, adds_after=1)))
    order = _reductions(gm.graph)
    other, of_last_call = order[6], order[-7:-1]  # the last one is of the embedding
    assert other.args[1].name == "added"
    of_last_call[position].prepend(other)
    chain_reductions(gm)
    expected = _sent(gm)
    reduce_in_regions(gm)
    assert len(_reductions(gm.graph)) == len(expected)
    assert _sent(gm) == expected


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.long), torch.bfloat16])
def test_no_bit_changes(one_rank, monkeypatch, dtype):
    gradients, left = [], []
    for moves in (True, False):

        def move(gm, moves=moves):
            if moves:
                reduce_in_regions(gm)
            left.append(len(_reductions(gm.graph)))

        monkeypatch.setattr(reductions, "reduce_in_regions", move)
        torch.manual_seed(0)
        model = _sharded(_Model(2), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        _step(model, inductor_config={"force_disable_caches": True})
        gradients.append([parameter.grad.to_local() for parameter in model.parameters()])
    assert left == [1, 13]
    for actual, expected in zip(*gradients, strict=True):
        assert torch.equal(actual, expected)
