"""Runs the passes in their order on a forward graph and its backward graph."""

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, cast

from torch import fx

from deepcompile_zero3 import source_key
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.calls import graph_modules
from deepcompile_zero3.graph.capture import add_capture, capture_pass
from deepcompile_zero3.graph.log import forward_numbers, log_graph
from deepcompile_zero3.graph.metadata import KEEP, KEPT_OF, PARAMETER
from deepcompile_zero3.graph.recording import add_graph, original_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.passes.facts import (
    ParameterFacts,
    in_backward_order,
    in_forward_order,
    in_gradient_order,
)
from deepcompile_zero3.passes.gather import (
    clone_returned_parameters,
    clone_returned_views,
    insert_gathers,
)
from deepcompile_zero3.passes.graph_parameters import (
    find_parameters,
    refuse_writes,
    saved_names,
    saved_positions,
)
from deepcompile_zero3.passes.graph_pass import (
    Direction,
    GraphFacts,
    GraphPass,
    Limits,
    Order,
    own_pass,
    without_key,
)
from deepcompile_zero3.passes.keep import choose_kept, mark_kept, may_keep
from deepcompile_zero3.passes.markers import (
    drop_needed_in_backward,
    drop_saved_markers,
    is_needed_in_backward,
)
from deepcompile_zero3.passes.reduce import insert_reduces
from deepcompile_zero3.passes.region_results import keep_strides_of_regions, move_products_out
from deepcompile_zero3.passes.verify.rewritten import Rewritten
from deepcompile_zero3.passes.verify.verifier import Verifier
from deepcompile_zero3.torch_internals import compiler

_Key = TypeVar("_Key")


def _insert_gathers(gm: fx.GraphModule, facts: GraphFacts) -> None:
    keep = {node for node in facts.gathered if node.meta.get(KEEP)}
    clone_returned_parameters(gm, facts.gathered, facts.saved)
    insert_gathers(gm, facts.gathered, facts.gather_bucket_bytes, keep, facts.gathers_ahead)


_core = functools.partial(own_pass, uuid=())  # their settings are in GraphFacts
_GATHERS = _core(  # a parameter may be a gradient, or a factor of one
    insert_gathers, _insert_gathers, changes=("gradients",)
)
_MARKERS = _core(
    drop_saved_markers, lambda gm, _: drop_saved_markers(gm), changes=("gradient_nodes",)
)
_STRIDES = _core(keep_strides_of_regions, lambda gm, _: keep_strides_of_regions(gm))
_CHAIN = _core(chain_reductions, lambda gm, _: chain_reductions(gm))

# The core's passes. Features add theirs: see :func:`in_order`.
CORE: Order = {
    "forward": (
        _core(choose_kept, mark_kept),
        _GATHERS,
        _MARKERS,
        _core(clone_returned_views, lambda gm, facts: clone_returned_views(gm, facts.saved)),
        _STRIDES,
        _CHAIN,
    ),
    "backward": (
        _core(
            drop_needed_in_backward,
            lambda gm, _: drop_needed_in_backward(gm),
            changes=("gradient_nodes",),
        ),
        _MARKERS,
        _core(
            move_products_out,
            lambda gm, facts: move_products_out(gm, facts.gradients),
            changes=("regions", "gradient_nodes"),
        ),
        _core(  # None takes the place of a gradient
            insert_reduces,
            lambda gm, facts: insert_reduces(gm, facts.gradients, facts.placeholders),
            changes=("signature",),
        ),
        _GATHERS,
        _STRIDES,
        _CHAIN,
    ),
    "lowered": (),
}


def in_order(features: Iterable[GraphPass]) -> Order:
    """Returns the core's passes, each with the passes of features behind it that follow it."""
    features = tuple(features)
    for each in features:
        for graph in {*each.graphs} - {"lowered"}:
            if each.after not in (ours.name for ours in CORE[cast(Direction, graph)]):
                raise ValueError(
                    f"pass '{each.name}' follows '{each.after}', which is no pass of the core over "
                    f"the {graph} graph"
                )

    def behind(ours: GraphPass, direction: Direction) -> Iterator[GraphPass]:
        yield ours
        yield from (each for each in features if each.follows(ours.name, direction))

    return {
        "forward": [each for ours in CORE["forward"] for each in behind(ours, "forward")],
        "backward": [each for ours in CORE["backward"] for each in behind(ours, "backward")],
        "lowered": [each for each in features if "lowered" in each.graphs],
    }


class Pipeline:
    """The passes that rewrite the forward and backward graphs of one of Dynamo's graphs.

    Args:
        inputs: facts of the parameters, keyed by position of the graph input.
        options: the backend's options, with passes that stand where they can.
        share: the share of their models' bytes that the parameters have.
        metadata: positions of inputs that functions of parameters may read, beside parameters.
        order: the passes of this library.
    """

    def __init__(
        self,
        inputs: Mapping[int, ParameterFacts],
        options: Options,
        share: float,
        metadata: Iterable[int] = (),
        order: Order = CORE,
    ) -> None:
        self.inputs = inputs
        self.options = options
        self.metadata = frozenset(metadata)
        self.order = order
        # A graph without parameters is compiled as by Inductor alone, and cached so.
        self.passes = tuple(options.passes) if inputs else ()
        self._limits = Limits.of(options, share)
        fqns = [facts.fqn for facts in inputs.values()]
        common = os.path.commonprefix(fqns)  # noqa: RUF071 (by characters, then cut at a dot)
        self._prefix = common.rfind(".") + 1  # characters of the common module's FQN
        self._kept: dict[str, int] = {}
        self._from_forward: dict[str, Any] = {}
        self.number = -1  # number of the forward in this process, once it is rewritten

    @property
    def key(self) -> tuple:
        """All that shapes what the passes make of a graph. Caches hold its ``repr``."""
        ours = [each.declared for passes in self.order.values() for each in passes]
        passes = [each.declared for each in self.passes]
        return source_key.AT_IMPORT, self.inputs, sorted(self.metadata), self._limits, ours, passes

    @property
    def may_be_stored(self) -> bool:
        """Whether caches may hold what the passes make of a graph."""
        ours = [each for passes in self.order.values() for each in passes]
        if not self.inputs:
            return True
        return source_key.is_unchanged() and not without_key([*self.passes, *ours])

    def __call__(self, graph_module: fx.GraphModule, is_backward: bool) -> Callable[[], None]:
        """Rewrites and numbers a graph that will run; gives it to captures, recordings and logs.

        Returns a function that runs the "lowered" passes over it, for Inductor.
        """
        original = original_of(graph_module)
        run = self.rewrite(graph_module, is_backward, is_shown=True)
        if not is_backward:
            self.number = next(forward_numbers)
        add_capture(graph_module, is_backward, self.number)
        add_graph(self.number, is_backward, self, original, graph_module)
        if self.inputs:
            direction, kept = ("backward", {}) if is_backward else ("forward", self._kept)
            log_graph(graph_module, direction, self.number, kept)
        # A graph without parameters is compiled as by Inductor alone.
        passes = self.order["lowered"] if is_backward and self.inputs else ()
        return functools.partial(run.all_of, passes)

    def rewrite(
        self, graph_module: fx.GraphModule, is_backward: bool, is_shown: bool = False
    ) -> "_Run":
        """Rewrites a graph. Called for the forward first, then for its backward.

        If it ``is_shown``, ``capture_graphs(passes=True)`` sees the passes. Returns the run, for
        more passes over the graph.
        """
        refuse_writes(graph_module, self.inputs)
        describe = self._describe_backward if is_backward else self._describe_forward
        facts = describe(graph_module)
        run = _Run(graph_module, facts, self.passes, self.inputs, is_shown)
        run.all_of(self.order[facts.direction])
        if not is_backward:
            self._from_forward = run.returned
            kept = (each for node, each in facts.gathered.items() if node.meta.get(KEEP))
            self._kept = {each.fqn: each.nbytes for each in kept}
        for gm in graph_modules(graph_module):  # once, since it takes longer than the passes
            gm.recompile()
        return run

    def _describe_forward(self, gm: fx.GraphModule) -> GraphFacts:
        """Names the inputs of a forward, and returns its facts."""
        nodes = _sorted(find_parameters(gm, self.inputs)[0], in_forward_order)
        _name_placeholders(nodes, self._prefix)
        gathered = _gathered(nodes)
        return GraphFacts(
            **vars(self._limits),
            direction="forward",
            parameters=_by_fqn(nodes.values()),
            # Only these may be kept: the runtime knows a gradient by its parameter's placeholder.
            may_keep=frozenset(each.fqn for node, each in gathered.items() if may_keep(node, each)),
            saved=frozenset(saved_positions(gm.graph.output_node())),
            saved_names=saved_names(gm.graph),
            gathered=MappingProxyType(gathered),
        )

    def _describe_backward(self, gm: fx.GraphModule) -> GraphFacts:
        """Names the inputs of a backward, and returns its facts."""
        nodes, gradients = find_parameters(gm, self.inputs)
        kept = {node: each for node, each in nodes.items() if each.fqn in self._kept}
        for node, each in kept.items():
            node.meta[KEPT_OF] = each.fqn
            del node.meta[PARAMETER]
            del nodes[node]
        inputs = gm.graph.find_nodes(op="placeholder")
        saved = {node: node.meta[PARAMETER] for node in inputs if PARAMETER in node.meta}
        # A parameter that might have been kept and was not appears in both.
        placeholders = {f.fqn: node for node, f in (*saved.items(), *nodes.items())}
        _name_placeholders(nodes | saved, self._prefix)
        _name_placeholders(kept, self._prefix, "_full")
        gathered = {node: each for node, each in nodes.items() if is_needed_in_backward(node)}
        return GraphFacts(
            **vars(self._limits),
            direction="backward",
            parameters=_by_fqn([*nodes.values(), *kept.values(), *saved.values()]),
            gathered=MappingProxyType(_sorted(_gathered(gathered), in_backward_order)),
            gradients=MappingProxyType(_sorted(gradients, in_gradient_order)),
            placeholders=MappingProxyType(placeholders),
            from_forward=MappingProxyType(self._from_forward),
        )


class _Run:
    """The passes over one graph, which is verified after each; runs the user's passes too.

    Attributes:
        returned: what passes over a forward have returned, by name.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        facts: GraphFacts,
        passes: Sequence[GraphPass],
        inputs: Mapping[int, ParameterFacts],
        is_shown: bool,
    ) -> None:
        self.returned: dict[str, Any] = {}
        self._gm = gm
        self._facts = facts
        self._passes = passes
        self._is_shown = is_shown
        self._verifier = None
        if inputs:
            results: Any = gm.graph.output_node().args[0]
            reduced = {f.fqn: f for i, f in facts.gradients.items() if results[i] is not None}
            may_keep = {node for node, f in facts.gathered.items() if f.fqn in facts.may_keep}
            graph = Rewritten(gm, reduced, facts.gradients.keys(), may_keep, facts.saved)
            with_peak = any(facts.direction in each.graphs for each in passes)
            self._verifier = Verifier(graph, facts.direction, with_peak)

    def all_of(self, passes: Iterable[GraphPass]) -> None:
        """Runs passes of this library, each with the user's passes that follow it."""
        for ours in passes:
            self._apply(ours, (*ours.changes, "gathered_peak"), ours)
            for each in self._passes:
                if each.follows(ours.name, self._facts.direction):
                    self._apply(each, each.changes, functools.partial(self._call, each))

    def _apply(
        self,
        each: GraphPass,
        changes: Collection[str],
        call: Callable[[fx.GraphModule, GraphFacts], Any],
    ) -> None:
        with self._captured(each.name):
            returned = call(self._gm, self._facts)
            if returned is not None:
                self.returned[each.name] = returned
            if self._verifier is not None:
                self._verifier.check(each.name, changes)

    def _captured(self, name: str) -> contextlib.AbstractContextManager[None]:
        if not self._is_shown:
            return contextlib.nullcontext()
        return capture_pass(self._gm, name, self._facts.direction)

    def _call(self, each: GraphPass, gm: fx.GraphModule, facts: GraphFacts) -> Any:
        """Calls a pass of the user's, whose errors and mistakes are told by its name."""
        where = f"pass '{each.name}' over the {facts.direction} graph"
        try:
            returned = each(gm, facts)
        except Exception as error:  # torch shows no more of it than the text
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise Zero3Error(
                f"{where} raised {type(error).__name__}: {error} (in {last.name}, "
                f"{last.filename}:{last.lineno})"
            ) from error
        is_graph = isinstance(returned, fx.GraphModule | fx.Graph)
        if is_graph or (returned is not None and facts.direction == "backward"):
            raise Zero3Error(
                f"{where} returned a {type(returned).__name__}: it changes the graph and returns "
                "None, or over a forward what it wants to know in the backward"
            )
        return returned


def _name_placeholders(
    inputs: Mapping[fx.Node, ParameterFacts], prefix: int, suffix: str = ""
) -> None:
    """Renames a graph's inputs after their parameters, without the first ``prefix`` characters."""
    for node, facts in inputs.items():
        compiler.rename(node, facts.fqn[prefix:].replace(".", "_") + suffix)


def _by_fqn(parameters: Iterable[ParameterFacts]) -> Mapping[str, ParameterFacts]:
    return MappingProxyType({facts.fqn: facts for facts in parameters})


def _gathered(nodes: Mapping[fx.Node, ParameterFacts]) -> dict[fx.Node, ParameterFacts]:
    return {node: facts for node, facts in nodes.items() if facts.is_gathered}


def _sorted(
    facts: Mapping[_Key, ParameterFacts], order: Callable[[ParameterFacts], int]
) -> dict[_Key, ParameterFacts]:
    return dict(sorted(facts.items(), key=lambda item: order(item[1])))
