"""Items of long lists are read from parts of them, which compilers' passes go through sooner."""

import operator

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from deepcompile_zero3.passes.long_lists import SHORT, read_in_parts
from deepcompile_zero3.runtime import WAITS


def _waits_for(count):
    graph = fx.Graph()
    wait = graph.call_function(WAITS[0], (graph.placeholder("handle"), []))
    wait.meta["val"] = [torch.empty(position, device="meta") for position in range(count)]
    items = []
    for position in range(count):
        items.append(graph.call_function(operator.getitem, (wait, position)))
        items[-1].meta["val"] = wait.meta["val"][position]
    graph.output(tuple(items))
    return fx.GraphModule({}, graph)


class _Run(fx.Interpreter):
    def call_function(self, target, args, kwargs):
        if target in WAITS:
            return [f"tensor {position}" for position in range(1000)]
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("count", [1, SHORT, SHORT + 1, 40, 289])
def test_items_of_a_long_list_stay_what_they_were(count):
    gm = _waits_for(count)
    expected = _Run(gm).run(None)
    values = [node.meta["val"] for node in gm.graph.output_node().all_input_nodes]
    read_in_parts(gm)
    gm.graph.lint()
    assert _Run(gm).run(None) == expected
    results = gm.graph.output_node().all_input_nodes
    assert [node.meta["val"] for node in results] == values
    assert "slice" in gm.code or count <= SHORT


def _read(gm):
    """Returns how many values all nodes take together, as a compiler's pass sees them."""
    given = fx.map_arg(
        [node.args for node in gm.graph.nodes if node.target is operator.getitem],
        lambda node: node.meta["val"],
    )
    return len(pytree.tree_leaves(given))


def test_what_nodes_take_does_not_grow_with_the_square_of_a_list():
    for count in (100, 400, 900):
        gm = _waits_for(count)
        assert _read(gm) > count**2
        read_in_parts(gm)
        assert _read(gm) < 6 * count**1.5
