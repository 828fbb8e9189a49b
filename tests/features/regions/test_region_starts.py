"""What compiling a graph costs for each call of a region, counted and not timed."""

import pytest
import torch
from support.region_models import WIDTH, Marked, Model, Plain

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.passes import region_results
from deepcompile_zero3.torch_internals import compiler
from deepcompile_zero3.torch_release import RELEASE


@pytest.fixture
def checks(monkeypatch):
    """Counts how often torch traces a region to see what the region writes to."""
    found = []
    gen_schema = type(compiler.invoke_subgraph).gen_schema

    def counted(self, *args, **kwargs):
        found.append(args)
        return gen_schema(self, *args, **kwargs)

    monkeypatch.setattr(type(compiler.invoke_subgraph), "gen_schema", counted)
    return found


def _step(block, depth):
    torch._dynamo.reset()
    model = Model(*[block] * depth)
    for each in model.blocks:
        fully_shard(each)
    options = {"inductor": False, "regions": True}
    run = torch.compile(fully_shard(model), backend="zero3", fullgraph=True, options=options)
    run(torch.randn(2, WIDTH, requires_grad=True)).backward()


@pytest.mark.skipif(RELEASE < (2, 13), reason="torch 2.11 checks each call")
@pytest.mark.parametrize("block", [Plain, Marked])  # found, and marked by the user
def test_torch_checks_a_region_as_often_for_many_calls_as_for_two(one_rank, checks, block):
    counts = []
    for depth in (2, 5):
        checks.clear()
        _step(block, depth)
        counts.append(len(checks))
    assert counts[0] == counts[1] > 0


def test_products_that_leave_a_region_are_not_traced_again(one_rank, monkeypatch):
    traced = []
    value_of = region_results.value_of

    def noted(node):
        traced.append(node.target)
        return value_of(node)

    monkeypatch.setattr(region_results, "value_of", noted)
    _step(Plain, 3)
    assert traced  # views of operands, which share their memory
    assert torch.ops.aten.mm.default not in traced
