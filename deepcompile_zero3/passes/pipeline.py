"""Runs the passes in their order on a forward graph and its backward graph."""

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from torch import fx

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.offload.activations import Offload, Saved, load_saved, offload_saved
from deepcompile_zero3.features.regions.results import (
    keep_strides_of_regions,
    move_products_out,
)
from deepcompile_zero3.features.wide_gradients.widen import widen_weight_gradients
from deepcompile_zero3.graph.calls import graph_modules
from deepcompile_zero3.graph.capture import add_capture, capture_pass
from deepcompile_zero3.graph.log import forward_numbers, log_graph
from deepcompile_zero3.graph.metadata import KEEP, KEPT_OF, PARAMETER
from deepcompile_zero3.graph.recording import add_graph, source_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.backward_gathers import (
    drop_needed_in_backward,
    drop_saved_markers,
    is_saved_for_backward,
)
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.passes.facts import (
    ParameterFacts,
    in_backward_order,
    in_forward_order,
    in_gradient_order,
)
from deepcompile_zero3.passes.gather import clone_returned_views, insert_gathers
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
    check_passes,
    without_key,
)
from deepcompile_zero3.passes.keep import choose_kept
from deepcompile_zero3.passes.reduce import insert_reduces
from deepcompile_zero3.passes.verify.rewritten import Rewritten, reductions_in
from deepcompile_zero3.passes.verify.verifier import Verifier
from deepcompile_zero3.torch_internals import compiler

_Key = TypeVar("_Key")

# The invariants that passes of this library give up. Some replace the nodes of gradients by others
# of the same values and kinds: "gradient_nodes".
_CHANGES = {
    "insert_gathers": ("gradients",),  # a parameter may be a gradient, or a factor of one
    "insert_reduces": ("signature",),  # None takes the place of a gradient
    "widen_weight_gradients": ("gradients",),
    "drop_needed_in_backward": ("gradient_nodes",),
    "drop_saved_markers": ("gradient_nodes",),
    "move_products_out": ("regions", "gradient_nodes"),
    "load_saved": ("gradients",),  # what a gradient is a product of may be loaded
}


class Pipeline:
    """The passes that rewrite the forward and backward graphs of one of Dynamo's graphs.

    Args:
        inputs: facts of the parameters, keyed by position of the graph input.
        options: the backend's options.
        keep_bytes: maximum size in bytes of the full tensors that the forward may keep for backward
            by choice.
        metadata: positions of inputs that functions of parameters may read, beside parameters.
        offload: where activations go that exceed a budget, or None.

    Raises:
        ValueError: ``options.passes`` are no passes, or do not stand where they can.
    """

    def __init__(
        self,
        inputs: Mapping[int, ParameterFacts],
        options: Options,
        keep_bytes: float,
        metadata: Iterable[int] = (),
        offload: Offload | None = None,
    ) -> None:
        check_passes(options.passes)
        self.inputs = inputs
        self.options = options
        self.metadata = frozenset(metadata)
        self.passes = tuple(options.passes)
        self._bucket_bytes = int(options.gather_bucket_mb * 2**20)
        self._ahead = options.gathers_ahead
        self._keep_bytes = keep_bytes
        self._fp32_weight_grads = options.fp32_weight_grads
        self._offload = offload
        fqns = [facts.fqn for facts in inputs.values()]
        common = os.path.commonprefix(fqns)  # noqa: RUF071 (by characters, then cut at a dot)
        self._prefix = common.rfind(".") + 1  # characters of the common module's FQN
        self._kept: dict[str, int] = {}
        self._saved = Saved(frozenset(), ())
        self.number = -1  # number of the forward in this process, once it is rewritten
        self._is_shown = False  # whether passes are captured

    @property
    def settings(self) -> tuple:
        """Inputs of the passes besides the graph."""
        limits = self._bucket_bytes, self._ahead, self._keep_bytes
        keys = [each.declared for each in self.passes if self.inputs]
        metadata = sorted(self.metadata)
        return self.inputs, metadata, *limits, self._fp32_weight_grads, self._offload, keys

    @property
    def offloads(self) -> bool:
        """Whether a forward may save copies in another place."""
        return self._offload is not None

    @property
    def may_be_stored(self) -> bool:
        """Whether caches may hold what the passes make of a graph."""
        return not (self.inputs and without_key(self.passes))

    def __call__(self, graph_module: fx.GraphModule, is_backward: bool) -> None:
        """Rewrites a graph that will run, numbers it, and shows it to those who want to see it."""
        source = source_of(graph_module)
        self.rewrite(graph_module, is_backward, is_shown=True)
        if not is_backward:
            self.number = next(forward_numbers)
        add_capture(graph_module, is_backward, self.number)
        add_graph(self.number, is_backward, self, source, graph_module)
        if self.inputs:
            direction, kept = ("backward", {}) if is_backward else ("forward", self._kept)
            log_graph(graph_module, direction, self.number, kept)

    def rewrite(
        self, graph_module: fx.GraphModule, is_backward: bool, is_shown: bool = False
    ) -> None:
        """Rewrites a graph. Called for the forward first, then for its backward.

        If it ``is_shown``, ``capture_graphs(passes=True)`` sees the passes.
        """
        self._is_shown = is_shown
        refuse_writes(graph_module, self.inputs)
        if is_backward:
            run = self._rewrite_backward(graph_module)
        else:
            run = self._rewrite_forward(graph_module)
        with run("keep_strides_of_regions"):
            keep_strides_of_regions(graph_module)
        with run("chain_reductions"):
            chain_reductions(graph_module)
        for each in graph_modules(graph_module):  # once, since it takes longer than the passes
            each.recompile()

    def _rewrite_forward(self, graph_module: fx.GraphModule) -> "_Run":
        saved = saved_names(graph_module.graph)  # before a pass replaces nodes
        nodes = _sorted(find_parameters(graph_module, self.inputs)[0], in_forward_order)
        _name_placeholders(nodes, self._prefix)
        # Only these may be kept: the runtime knows a gradient by its parameter's placeholder.
        known = {n: f for n, f in nodes.items() if is_saved_for_backward(n) or not f.is_trained}
        known, gathered = _gathered(known), _gathered(nodes)
        run = self._run(graph_module, "forward", nodes.values(), {}, _keepable(known))
        with run("choose_kept"):
            for node in choose_kept(_sorted(known, in_backward_order), self._keep_bytes):
                node.meta[KEEP] = True
        keep = {node for node in known if node.meta.get(KEEP)}
        self._kept.update({nodes[node].fqn: nodes[node].nbytes for node in keep})
        with run("insert_gathers"):
            insert_gathers(graph_module, gathered, self._bucket_bytes, keep, self._ahead)
        with run("drop_saved_markers"):
            drop_saved_markers(graph_module)
        with run("clone_returned_views"):
            clone_returned_views(graph_module, run.facts.saved)
        with run("offload_saved"):
            if self._offload is not None:
                self._saved = offload_saved(graph_module, saved, self._offload)
        return run

    def _rewrite_backward(self, graph_module: fx.GraphModule) -> "_Run":
        nodes, gradients = find_parameters(graph_module, self.inputs)
        kept = {node: facts for node, facts in nodes.items() if facts.fqn in self._kept}
        for node, facts in kept.items():
            node.meta[KEPT_OF] = facts.fqn
            del node.meta[PARAMETER]
            del nodes[node]
        inputs = graph_module.graph.find_nodes(op="placeholder")
        saved = {node: node.meta[PARAMETER] for node in inputs if PARAMETER in node.meta}
        # A parameter that might have been kept and was not appears in both.
        placeholder_of = {f.fqn: node for node, f in (*saved.items(), *nodes.items())}
        _name_placeholders(nodes | saved, self._prefix)
        _name_placeholders(kept, self._prefix, "_full")
        everything = (*nodes.values(), *kept.values(), *saved.values())
        run = self._run(graph_module, "backward", everything, gradients)
        with run("drop_needed_in_backward"):
            gathered = drop_needed_in_backward(graph_module)
        with run("drop_saved_markers"):
            drop_saved_markers(graph_module)
        nodes = {n: facts for n, facts in nodes.items() if n in gathered or n.users}
        gradients = _sorted(gradients, in_gradient_order)
        with run("move_products_out"):
            move_products_out(graph_module, gradients)
        with run("widen_weight_gradients"):
            if self._fp32_weight_grads:
                widen_weight_gradients(graph_module, gradients)
        with run("insert_reduces"):
            insert_reduces(graph_module, gradients, placeholder_of)
        nodes = _sorted(_gathered(nodes), in_backward_order)
        with run("insert_gathers"):
            insert_gathers(graph_module, nodes, self._bucket_bytes, ahead=self._ahead)
        with run("load_saved"):
            if self._offload is not None:
                load_saved(graph_module, self._saved, self._offload)
        return run

    def _run(
        self,
        gm: fx.GraphModule,
        direction: Direction,
        parameters: Iterable[ParameterFacts],
        gradients: Mapping[int, ParameterFacts],
        may_keep: Collection[fx.Node] = (),
    ) -> "_Run":
        by_fqn = MappingProxyType({facts.fqn: facts for facts in parameters})
        names = frozenset(node.meta[PARAMETER].fqn for node in may_keep)
        saved = saved_positions(gm.graph.output_node()) if direction == "forward" else set()
        limits = self._bucket_bytes, self._keep_bytes, self._ahead
        facts = GraphFacts(direction, by_fqn, names, frozenset(saved), *limits)
        # A graph without parameters is compiled as by Inductor alone, and cached so.
        passes = [each for each in self.passes if self.inputs and direction in each.graphs]
        results: Any = gm.graph.output_node().args[0]
        reduced = {f.fqn: f for i, f in gradients.items() if results[i] is not None}
        early = set(reductions_in(gm.graph))
        graph = Rewritten(gm, reduced, gradients.keys(), may_keep, facts.saved, early, [])
        verifier = Verifier(graph, direction, bool(passes)) if self.inputs else None
        return _Run(gm, facts, passes, verifier, self._is_shown)


class _Run:
    """The passes over one graph, which is verified after each; runs the user's passes too."""

    def __init__(
        self,
        gm: fx.GraphModule,
        facts: GraphFacts,
        passes: Sequence[GraphPass],
        verifier: Verifier | None,
        is_shown: bool,
    ) -> None:
        self._is_shown = is_shown
        self._gm = gm
        self.facts = facts
        self._passes = passes
        self._verifier = verifier

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Runs the body as the pass ``name``, and then the user's passes that follow ``name``."""
        with self._captured(name):
            yield
            self._check(name, (*_CHANGES.get(name, ()), "gathered_peak"))
        for each in self._passes:
            if each.after == name:
                with self._captured(each.name):
                    self._apply(each)
                    self._check(each.name, each.changes)

    def _captured(self, name: str) -> contextlib.AbstractContextManager[None]:
        if not self._is_shown:
            return contextlib.nullcontext()
        return capture_pass(self._gm, name, self.facts.direction)

    def _check(self, name: str, changes: Collection[str]) -> None:
        if self._verifier is not None:
            self._verifier.check(name, changes)

    def _apply(self, each: GraphPass) -> None:
        where = f"pass '{each.name}' over the {self.facts.direction} graph"
        try:
            result: Any = each(self._gm, self.facts)  # type: ignore[func-returns-value]
        except Exception as error:  # torch shows no more of it than the text
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise Zero3Error(
                f"{where} raised {type(error).__name__}: {error} (in {last.name}, "
                f"{last.filename}:{last.lineno})"
            ) from error
        if result is not None:
            raise Zero3Error(
                f"{where} returned a {type(result).__name__}: it changes the graph and returns None"
            )


@functools.cache
def source_key() -> bytes:
    """Returns a key of this library's sources."""
    return compiler.get_hash_for_files(
        tuple(sorted(map(str, Path(__file__).parents[1].rglob("*.py"))))
    )


def _name_placeholders(
    inputs: Mapping[fx.Node, ParameterFacts], prefix: int, suffix: str = ""
) -> None:
    """Renames a graph's inputs after their parameters, without the first ``prefix`` characters."""
    for node, facts in inputs.items():
        compiler.rename(node, facts.fqn[prefix:].replace(".", "_") + suffix)


def _keepable(nodes: Mapping[fx.Node, ParameterFacts]) -> set[fx.Node]:
    saved = (node for node in nodes if any(user.op == "output" for user in node.users))
    return {node for node in saved if nodes[node].may_be_kept}


def _gathered(nodes: Mapping[fx.Node, ParameterFacts]) -> dict[fx.Node, ParameterFacts]:
    return {node: facts for node, facts in nodes.items() if facts.is_gathered}


def _sorted(
    facts: Mapping[_Key, ParameterFacts], order: Callable[[ParameterFacts], int]
) -> dict[_Key, ParameterFacts]:
    return dict(sorted(facts.items(), key=lambda item: order(item[1])))
