"""A graph while passes rewrite it, and what it was like before the latest pass."""

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.graph.calls import graph_modules
from deepcompile_zero3.graph.metadata import KEEP, KEPT_OF, PARAMETER, formats_of
from deepcompile_zero3.graph.peak import gathered_items, gathered_peak
from deepcompile_zero3.graph.text import node_text
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops

_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow)


@dataclass
class Rewritten:
    """A graph while passes rewrite it.

    Attributes:
        gm: the graph.
        gradients: the parameters whose gradients it computes, keyed by FQN.
        may_keep: inputs that it may keep gathered for backward.
        saved: positions of its results that are saved for backward.
        has_gathers: whether ``insert_gathers`` has run.
        has_reductions: whether ``insert_reduces`` has run.
        is_chained: whether ``chain_reductions`` has run.
    """

    gm: fx.GraphModule
    gradients: Mapping[str, ParameterFacts]
    may_keep: Collection[fx.Node]
    saved: Collection[int]
    has_gathers: bool = False
    has_reductions: bool = False
    is_chained: bool = False

    @property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the graph."""
        return self.gm.graph.find_nodes(op="placeholder")

    @property
    def starts(self) -> list[fx.Node]:
        """The starts of gathers, in order."""
        target = ops.all_gather_start.default
        return self.gm.graph.find_nodes(op="call_function", target=target)

    @property
    def reductions(self) -> list[fx.Node]:
        """The reductions, in order."""
        return [node for node in self.gm.graph.nodes if node.target in REDUCTIONS]

    @property
    def results(self) -> list[Any]:
        """What the graph returns."""
        results: Any = self.gm.graph.output_node().args[0]
        return list(results)

    @property
    def kept(self) -> set[fx.Node]:
        """The inputs that are marked to be kept gathered for backward."""
        return {node for node in self.inputs if node.meta.get(KEEP)}

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """All nodes of the graph and of the regions that it calls."""
        for gm in graph_modules(self.gm):
            yield from gm.graph.nodes

    @property
    def gathered(self) -> dict[fx.Node, fx.Node]:
        """The placeholder of each gathered tensor."""
        return {
            item: wait.args[1][position]
            for wait in self.gm.graph.nodes
            if wait.target in WAITS
            for position, item in gathered_items(wait)
        }


class Reduced(NamedTuple):
    """A reduction as it was: what the gradient was computed by, its dtype and its shape."""

    source: fx.Node
    dtype: torch.dtype
    shape: str


class State(NamedTuple):
    """What a graph was like before a pass.

    Attributes:
        nodes: its nodes, and those of the regions that it calls.
        inputs: its inputs.
        results: what it returned.
        kinds: texts of these results' dtypes and shapes, or what else they were.
        kept: the inputs that were marked to be kept.
        gathers: FQN and format of the parameters of each gather, or None before there were any.
        reduced: the reduction of each parameter, by FQN, or None before there were any.
        peak: predicted peak in bytes of gathered parameters, if it is asked for.
    """

    nodes: frozenset[fx.Node]
    inputs: list[fx.Node]
    results: list[Any]
    kinds: list[str]
    kept: set[fx.Node]
    gathers: list[list[tuple[str, str]]] | None
    reduced: Mapping[str, Reduced] | None
    peak: int

    @staticmethod
    def of(graph: Rewritten, with_peak: bool) -> "State":
        """Returns the state of a graph as it is now."""
        return State(
            frozenset(graph.nodes),
            graph.inputs,
            graph.results,
            list(map(kind_of, graph.results)),
            graph.kept,
            gathers_of(graph) if graph.has_gathers else None,
            {fqn_of(each): reduced_by(each) for each in graph.reductions}
            if graph.has_reductions
            else None,
            gathered_peak(graph.gm.graph) if with_peak else 0,
        )


def kind_of(result: Any) -> str:
    """Returns the dtype, shape and device of a graph's result as text, or what else it is."""
    if not isinstance(result, fx.Node):
        return repr(result)
    value = result.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    # As text: to compare symbols would add guards.
    return f"{value.dtype} {_shape_of(value)} on {value.device}"


def gathers_of(graph: Rewritten) -> list[list[tuple[str, str]]]:
    """Returns the FQN and the format of the parameters of each gather, in order."""
    result = []
    for start in graph.starts:
        placeholders: Any = start.args[0]
        fqns = [node.meta[PARAMETER].fqn for node in placeholders]
        result.append(list(zip(fqns, formats_of(start), strict=True)))
    return result


def fqn_of(reduction: fx.Node) -> str:
    """Returns the FQN of the parameter whose gradient is reduced."""
    placeholder: Any = reduction.args[1]
    fqn: str = placeholder.meta[PARAMETER].fqn
    return fqn


def reduced_by(reduction: fx.Node) -> Reduced:
    """Returns what a reduction gets."""
    source: Any = reduction.args[0]
    if isinstance(source, fx.Node):
        value = source.meta["val"]
        return Reduced(source, value.dtype, _shape_of(value))
    last = source[-1]  # of the factors of a product, or of indices and values
    return Reduced(last, last.meta["val"].dtype, "")


def _shape_of(value: torch.Tensor) -> str:
    return f"[{', '.join(map(str, value.shape))}]"


def writes_of(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes whose memory ``node`` writes to."""
    if not isinstance(node.target, torch_internals.OpOverload):
        name = getattr(node.target, "__name__", "")  # of a packet such as aten.add_, or iadd
        is_in_place = name.endswith("_") or node.target in _IN_PLACE
        return [base_of(each) for each in node.all_input_nodes[:1]] if is_in_place else []
    schema = torch_internals.schema_of(node.target)
    if not schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given: Any = node.kwargs.get(argument.name)
        if given is None and position < len(node.args):
            given = node.args[position]
        for each in given if isinstance(given, list | tuple) else [given]:
            if isinstance(each, fx.Node):
                written.append(base_of(each))
    return written


def described(node: fx.Node, gathered: Mapping[fx.Node, fx.Node]) -> str:
    """Returns what a node is, for messages: a parameter's name, or the name of the node."""
    meta = gathered.get(node, node).meta
    if PARAMETER in meta:
        return f"'{meta[PARAMETER].fqn}'"
    return f"'{meta.get(KEPT_OF, node.name)}'"


def at(node: fx.Node | None) -> str:
    """Returns where a message points to."""
    return f", at the node '{node_text(node)}'" if node is not None else ""
