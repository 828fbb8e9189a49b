"""Small graphs for the passes, and facts of their parameters."""

import dataclasses
import textwrap

import expecttest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from deepcompile_zero3.graph.metadata import PARAMETER, fqns_of
from deepcompile_zero3.graph.text import graph_text
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.reduce import insert_reduces

NO_LIMIT = 2**30
LARGE = 2**20  # bytes of a parameter whose gradient is computed where it is sent from


def partitioned_graph(function, *inputs):
    """Returns a flat graph with each node's value in ``meta["val"]``, as after a partitioner."""
    gm = fx.symbolic_trace(function)
    with FakeTensorMode() as mode:
        FakeTensorProp(gm, mode).propagate(*inputs)
    return gm


def facts(fqn, **changes):
    return ParameterFacts(fqn=fqn, **{"process_group": 0, "nbytes": 64, **changes})


_OTHER = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    str: lambda value: value + "x",
    tuple: lambda value: (*value, 9),
    torch.dtype: lambda value: torch.float64,
    type(None): lambda value: torch.float32,
}


def each_fact_changed(record):
    """Yields the name of each field of a frozen record, and the record with another value there."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        yield field.name, dataclasses.replace(record, **{field.name: _OTHER[type(value)](value)})


def of_layers(gm, **changes):
    """Returns facts of the graph's inputs w1, w2, ..., which are fc1.weight, fc2.weight, ..."""
    weights = [n for n in gm.graph.find_nodes(op="placeholder") if n.name.startswith("w")]
    known = {n: facts(f"fc{n.name[1:]}.weight", **changes.get(n.name, {})) for n in weights}
    for node, of_weight in known.items():
        node.meta[PARAMETER] = of_weight
    return known


def assert_text(gm, expected, lines=None):
    """Asserts that a graph's text, or ``lines``, equals an expected text, indented as in a test."""
    gm.graph.lint()
    text = textwrap.indent(lines or graph_text(gm), 8 * " ")
    expecttest.assert_expected_inline(f"{text}\n        ", expected, skip=1)


def three_layers(x, w1, w2, w3):
    h = torch.mm(x, w1)
    h = torch.mm(h, w2)
    return torch.mm(h, w3)


def square(count=1):
    return [torch.empty(4, 4) for _ in range(count)]


def reduce(gm, gradients):
    """Runs ``insert_reduces``; parameters' placeholders are the last inputs of the graph."""
    placeholders = {}
    for of_parameter in gradients.values():
        with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
            node = gm.graph.placeholder(of_parameter.fqn.replace(".", "_"))
        node.meta[PARAMETER] = of_parameter
        placeholders[of_parameter.fqn] = node
    insert_reduces(gm, gradients, placeholders)


def reductions_of(gm):
    """Returns the reduction's op by FQN."""
    nodes = [node for node in gm.graph.nodes if "zero3.reduce" in str(node.target)]
    return {fqns_of(node)[0]: node.target.name().removeprefix("zero3::") for node in nodes}
