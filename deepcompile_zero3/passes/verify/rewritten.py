"""A graph while passes rewrite it, and its state before the latest pass."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.graph.calls import arguments_of, called_by, graph_modules, region_named
from deepcompile_zero3.graph.metadata import KEEP, KEPT_OF, PARAMETER, formats_of, fqns_of
from deepcompile_zero3.graph.peak import gathered_items, gathered_peak
from deepcompile_zero3.graph.text import node_text
from deepcompile_zero3.passes.chain import reductions_in
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.gather import insert_gathers
from deepcompile_zero3.passes.reduce import insert_reduces
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops
from deepcompile_zero3.torch_internals import compiler


@dataclass
class Rewritten:
    """A graph while passes rewrite it.

    Attributes:
        gm: the graph.
        gradients: the parameters whose gradients it computes, keyed by FQN.
        gradient_positions: positions of these gradients among its results.
        may_keep: inputs that it may keep gathered for backward.
        saved: positions of its results that are saved for backward.
        ran: names of the passes that have run, the latest one last.
        changes: invariants that the latest pass gives up.
    """

    gm: fx.GraphModule
    gradients: Mapping[str, ParameterFacts]
    gradient_positions: Collection[int]
    may_keep: Collection[fx.Node]
    saved: Collection[int]
    ran: list[str] = field(default_factory=list)
    changes: Collection[str] = ()

    def __post_init__(self) -> None:
        # AOTAutograd differentiates an ``unshard`` that was not lifted, ahead of all passes.
        self._early = {node for node, _ in self._all_reductions()}

    @property
    def inputs(self) -> list[fx.Node]:
        """The inputs of the graph."""
        return self.gm.graph.find_nodes(op="placeholder")

    @property
    def output(self) -> fx.Node:
        """The node that returns the results."""
        return self.gm.graph.output_node()

    @property
    def results(self) -> list[Any]:
        """The results of the graph."""
        results: Any = self.output.args[0]
        return list(results)

    @property
    def starts(self) -> list[fx.Node]:
        """The starts of gathers, in order."""
        target = ops.all_gather_start.default
        return self.gm.graph.find_nodes(op="call_function", target=target)

    @property
    def reductions(self) -> list[tuple[fx.Node, fx.Node]]:
        """The reductions of passes in order, with their parameters; for each call of a region."""
        return [each for each in self._all_reductions() if each[0] not in self._early]

    def _all_reductions(self) -> Iterator[tuple[fx.Node, Any]]:
        in_regions: dict[str, list[fx.Node]] = {}  # most have none
        for node in self.gm.graph.nodes:
            if node.target in REDUCTIONS:
                yield node, node.args[1]
            elif node.target is compiler.invoke_subgraph:
                name = called_by(node)
                if name not in in_regions:
                    in_regions[name] = reductions_in(region_named(self.gm, name).graph)
                given = self._given(node) if in_regions[name] else {}
                for reduction in in_regions[name]:
                    yield reduction, given.get(cast(fx.Node, reduction.args[1]))

    @property
    def kept(self) -> set[fx.Node]:
        """The inputs that are marked to be kept gathered for backward."""
        return {node for node in self.inputs if node.meta.get(KEEP)}

    @property
    def regions(self) -> list[fx.GraphModule]:
        """The graphs that it calls."""
        return [gm for gm in graph_modules(self.gm) if gm is not self.gm]

    def uses_by(self, user: fx.Node, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """Returns ``user`` and ``node``, or users and input inside of the region that it calls.

        Args:
            user: a node of the graph that uses ``node``.
            node: a node of the graph.
        """
        if user.target is not compiler.invoke_subgraph:
            return [(user, node)]
        given = self._given(user).items()
        return [(each, own) for own, outer in given if outer is node for each in own.users]

    def _given(self, call: fx.Node) -> dict[fx.Node, Any]:
        """Returns the arguments of a call, by the region's inputs."""
        region = region_named(self.gm, called_by(call))
        inputs = region.graph.find_nodes(op="placeholder")
        return dict(zip(inputs, arguments_of(call), strict=True))

    def origins(self) -> Callable[[Any], fx.Node | None]:
        """Returns a function that finds the parameter's placeholder of which a node is a view."""
        gathered = {
            item: wait.args[1][position]
            for wait in self.gm.graph.nodes
            if wait.target in WAITS
            for position, item in gathered_items(wait)
        }

        def origin(node: Any) -> fx.Node | None:
            if not isinstance(node, fx.Node):
                return None
            base = base_of(node)
            placeholder = gathered.get(base, base)
            is_parameter = {PARAMETER, KEPT_OF} & placeholder.meta.keys()
            return placeholder if is_parameter and placeholder.op == "placeholder" else None

        return origin


class State(NamedTuple):
    """The state of a graph before a pass.

    Attributes:
        targets: the functions that its nodes call; nodes of its regions are included.
        writes: the nodes that each operator wrote to, if it wrote.
        inputs: its inputs.
        output: the node that returned its results.
        results: the results that it returned.
        kinds: dtype, shape and device of each result as text; other values are named by type.
        origins: the placeholder of the parameter that each result is a view of, if any.
        kept: the inputs that were marked to be kept.
        regions: kinds of the inputs and results of the graphs that it calls.
        gathers: FQN and format of the parameters of each gather, or None before there were any.
        reduced: the nodes that each reduction got, by FQN, or None before there were any.
        peak: predicted peak in bytes of gathered parameters, if it is asked for.
    """

    targets: Mapping[fx.Node, Any]
    writes: Mapping[fx.Node, list[fx.Node]]
    inputs: list[fx.Node]
    output: fx.Node
    results: list[Any]
    kinds: list[str]
    origins: list[fx.Node | None]
    kept: set[fx.Node]
    regions: list[list[str]]
    gathers: list[list[tuple[str, str]]] | None
    reduced: Mapping[str, tuple[Any, ...]] | None
    peak: int

    @staticmethod
    def of(graph: Rewritten, with_peak: bool) -> "State":
        """Returns the state of a graph as it is now."""
        results = graph.results
        reductions = graph.reductions if insert_reduces.__name__ in graph.ran else None
        nodes = [node for gm in (graph.gm, *graph.regions) for node in gm.graph.nodes]
        return State(
            {node: node.target for node in nodes},
            {node: written for node in nodes if (written := writes_of(node))},
            graph.inputs,
            graph.output,
            results,
            list(map(kind_of, results)),
            list(map(graph.origins(), results)),
            graph.kept,
            list(map(kinds_of_region, graph.regions)),
            gathers_of(graph) if insert_gathers.__name__ in graph.ran else None,
            None
            if reductions is None
            else {fqn_of(of): sources_of(each) for each, of in reductions},
            gathered_peak(graph.gm.graph) if with_peak else 0,
        )


def kind_of(result: Any) -> str:
    """Returns the dtype, shape and device of a graph's result as text, or another value's type.

    An offloaded result is described as the tensor that it was.
    """
    if isinstance(result, fx.Node) and result.target is ops.store_wait.default:
        result = result.args[1]
    if not isinstance(result, fx.Node):
        return repr(result)
    value = result.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    # As text: to compare symbols would add guards.
    return f"{value.dtype} [{', '.join(map(str, value.shape))}] on {value.device}"


def kinds_of_region(region: fx.GraphModule) -> list[str]:
    """Returns the kinds of a region's inputs and results."""
    results: Any = region.graph.output_node().args[0]
    results = results if isinstance(results, list | tuple) else [results]
    return [kind_of(each) for each in (*region.graph.find_nodes(op="placeholder"), None, *results)]


def gathers_of(graph: Rewritten) -> list[list[tuple[str, str]]]:
    """Returns the FQN and the format of the parameters of each gather, in order."""
    return [list(zip(fqns_of(start), formats_of(start), strict=True)) for start in graph.starts]


def fqn_of(placeholder: fx.Node) -> str:
    """Returns the FQN of the parameter that an input stands for."""
    return placeholder.meta[PARAMETER].fqn


def sources_of(reduction: fx.Node) -> tuple[Any, ...]:
    """Returns the nodes that a reduction gets, and the dtype of the last."""
    given: Any = reduction.args[0]
    nodes = (given,) if isinstance(given, fx.Node) else tuple(given)
    return (*nodes, nodes[-1].meta["val"].dtype)


def writes_of(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes whose memory an operator writes to."""
    if not isinstance(node.target, torch_internals.OpOverload):
        return []
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
        given = given if isinstance(given, list | tuple) else [given]
        written += [base_of(each) for each in given if isinstance(each, fx.Node)]
    return written


def described(node: fx.Node) -> str:
    """Returns a node's name for messages: the FQN of its parameter, if it stands for one."""
    if PARAMETER in node.meta:
        return f"'{node.meta[PARAMETER].fqn}'"
    return f"'{node.meta.get(KEPT_OF, node.name)}'"


def at(node: fx.Node | None) -> str:
    """Returns where a message points to."""
    return f", at the node '{node_text(node)}'" if node is not None else ""
