"""The invariants of rewritten graphs, which hold after every pass, ours or the user's.

``INVARIANTS`` has them, each with its promise as a sentence. The order matters: a check may rely on
the promises before it.
"""

import operator
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import fx

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.graph.metadata import PARAMETER, formats_of
from deepcompile_zero3.graph.peak import gathered_peak
from deepcompile_zero3.passes.chain import chain_reductions, reductions_in
from deepcompile_zero3.passes.gather import clone_returned_views, insert_gathers, reads
from deepcompile_zero3.passes.keep import choose_kept
from deepcompile_zero3.passes.markers import saved_for_backward
from deepcompile_zero3.passes.reduce import insert_reduces
from deepcompile_zero3.passes.verify.rewritten import (
    Rewritten,
    State,
    described,
    fqn_of,
    gathers_of,
    kind_of,
    kinds_of_region,
    sources_of,
    writes_of,
)
from deepcompile_zero3.runtime import _C, REDUCTIONS, WAITS, ops

# What is broken, and the node that breaks it, if it is one.
Violation: TypeAlias = tuple[str, fx.Node | None]
_Check: TypeAlias = Callable[[Rewritten, State], Iterator[Violation]]

# The promise of each invariant, and a function that yields the places where it is broken.
INVARIANTS: dict[str, tuple[str, _Check]] = {}

_COLLECTIVES = (ops.all_gather_start.default, *WAITS, *REDUCTIONS)


def _invariant(promise: str) -> Callable[[_Check], _Check]:
    def decorate(check: _Check) -> _Check:
        INVARIANTS[check.__name__.removeprefix("_")] = promise, check
        return check

    return decorate


@_invariant("each node follows those that it uses; a new one calls an operator and has meta['val']")
def _well_formed(graph: Rewritten, before: State) -> Iterator[Violation]:
    for gm in (graph.gm, *graph.regions):
        known: set[fx.Node] = set()
        for node in gm.graph.nodes:
            for source in node.all_input_nodes:
                if source not in known:
                    yield f"'{source.name}' is used before it is computed", node
            known.add(node)
            if node.op not in ("placeholder", "output") and before.targets.get(node) != node.target:
                if node.op != "call_function" or not _is_operator(node):
                    yield "it does not call an operator, such as aten.mul.Tensor", node
                elif "val" not in node.meta:
                    yield "a new node has no meta['val'], the fake tensor of its result", node
                elif node.target in _COLLECTIVES and set(node.kwargs) - {"contract"}:
                    yield "its arguments are given by position, but for the contract", node
        try:
            gm.graph.lint()
        except (RuntimeError, ValueError) as error:
            yield str(error), None


def _is_operator(node: fx.Node) -> bool:
    if isinstance(node.target, torch_internals.OpOverload) or node.target is operator.getitem:
        return True
    values = [source.meta.get("val") for source in node.all_input_nodes]
    # Other functions may only compute sizes.
    return not any(isinstance(value, torch.Tensor | list | tuple) for value in values)


@_invariant("a graph keeps its inputs, and the number, dtypes, shapes and devices of its results")
def _signature(graph: Rewritten, before: State) -> Iterator[Violation]:
    if graph.inputs != before.inputs:
        left = set(graph.inputs)
        gone = [node.name for node in before.inputs if node not in left]
        yield f"inputs were {'removed: ' + ', '.join(gone) if gone else 'added or moved'}", None
    if graph.output is not before.output:
        yield "the output node was replaced: change its arguments", graph.output
    if not isinstance(graph.output.args[0], list | tuple):
        yield "it returns one node, and returned a list", graph.output
        return
    kinds = list(map(kind_of, graph.results))
    if len(kinds) != len(before.kinds):
        yield f"it returns {len(kinds)} results, and returned {len(before.kinds)}", None
        return
    for position, (now, then) in enumerate(zip(kinds, before.kinds, strict=True)):
        is_free = position in graph.gradient_positions and "gradients" in graph.changes
        if now != then and not is_free:
            yield f"result {position} was {then} and is {now}", graph.output


@_invariant(
    "a graph that is called keeps the kinds of its inputs and results, and has no collective"
)
def _regions(graph: Rewritten, before: State) -> Iterator[Violation]:
    if list(map(kinds_of_region, graph.regions)) != before.regions:
        yield "inputs or results of a graph that it calls have changed", None
    for region in graph.regions:
        for node in region.graph.nodes:
            if node.target in _COLLECTIVES and node not in before.targets:
                yield "a collective is in a graph that is called", node


@_invariant("what is kept for backward is chosen ahead of the gathers, among what may be kept")
def _kept(graph: Rewritten, before: State) -> Iterator[Violation]:
    kept = graph.kept
    for node in graph.gm.graph.nodes:  # in an order that ranks share
        if node in kept and node not in graph.may_keep:
            yield "it is marked to be kept gathered, and may not be", node
    for node in graph.inputs:
        if node not in graph.may_keep:
            continue
        is_kept = node in kept
        if insert_gathers.__name__ in graph.ran and is_kept != (node in before.kept):
            place = choose_kept.__name__
            yield f"its mark has changed, which is too late: after='{place}' is the place", node
        if not is_kept and node.meta[PARAMETER].reshard_after_forward is False:
            yield "it has reshard_after_forward=False, and is not kept", node


@_invariant("each gather is of parameters of one kind, started once and waited for once")
def _gathers_are_paired(graph: Rewritten, before: State) -> Iterator[Violation]:
    for start in graph.starts:
        if insert_gathers.__name__ not in graph.ran:
            yield f"gathers come with the pass '{insert_gathers.__name__}'", start
        waits = [user for user in start.users if user.target in WAITS and user.args[0] is start]
        placeholders: Any = start.args[0]
        for node in placeholders:
            if PARAMETER not in node.meta:
                yield f"'{node.name}' is gathered, and is no parameter", start
        if len(waits) != 1:
            yield f"{len(waits)} nodes wait for a gather, and one must", start
            continue
        waited_for: Any = waits[0].args[1]
        if list(waited_for) != list(placeholders):
            yield "it waits for other parameters than its gather starts", waits[0]
        for item in waits[0].users:
            number: Any = item.args[1]
            if item.target is operator.getitem and not 0 <= number <= len(placeholders):
                yield f"the gather has {len(placeholders)} parameters and a token", item
        if len(formats_of(start)) != len(placeholders):
            yield "it has another number of formats than of parameters", start
        facts = [node.meta[PARAMETER] for node in placeholders]
        as_views = waits[0].target is ops.all_gather_views.default
        if len({(each.process_group, each.gathers_views) for each in facts}) > 1:
            yield "its parameters differ in process_group or gathers_views", start
        elif as_views != facts[0].gathers_views:
            yield f"its parameters have gathers_views={facts[0].gathers_views}", waits[0]


@_invariant("a parameter is read as gathered, never by its placeholder")
def _gathers_before_reads(graph: Rewritten, before: State) -> Iterator[Violation]:
    if insert_gathers.__name__ not in graph.ran:
        return
    for node in graph.inputs:
        facts = node.meta.get(PARAMETER)
        if facts is None or not facts.is_gathered:
            continue
        for user in node.users:
            is_marker = user.op == "output" or user.target is saved_for_backward
            if not is_marker and any(_computes(each, of) for each, of in graph.uses_by(user, node)):
                yield f"'{facts.fqn}' is read by its placeholder, which has no data", user
    for position, (result, was) in enumerate(zip(graph.results, before.results, strict=True)):
        if result is was or position in graph.saved or not isinstance(result, fx.Node):
            continue
        facts = result.meta.get(PARAMETER) if result.op == "placeholder" else None
        if facts is not None and facts.is_gathered:
            what = f"the placeholder of '{facts.fqn}', which has no data, is result {position}"
            yield what, graph.output


def _computes(user: fx.Node, placeholder: fx.Node) -> bool:
    return reads(user, placeholder) or user.target not in _COLLECTIVES


@_invariant("the same parameters are gathered in the same format, each once: other ranks wait")
def _same_gathers(graph: Rewritten, before: State) -> Iterator[Violation]:
    if before.gathers is None:
        return
    was = sorted(each for gather in before.gathers for each in gather)
    now = sorted(each for gather in gathers_of(graph) for each in gather)
    if was != now:
        missing = [each for each in was if each not in now]
        more = [each for each in now if each not in was or now.count(each) > was.count(each)]
        yield f"missing: {_listed(missing) or 'none'}; new: {_listed(more) or 'none'}", None


@_invariant("gathers stay in their order and their buckets")
def _gather_order(graph: Rewritten, before: State) -> Iterator[Violation]:
    now = gathers_of(graph)
    if before.gathers is not None and now != before.gathers:
        was, is_ = (
            ", ".join(f"[{_listed(each)}]" for each in gathers) for gathers in (before.gathers, now)
        )
        yield f"gathers were {was}, and are {is_}", None


@_invariant("the start or wait of each gather depends on the one before: no scheduler swaps them")
def _gathers_are_chained(graph: Rewritten, before: State) -> Iterator[Violation]:
    waits = [node for node in graph.gm.graph.nodes if node.target in WAITS]
    for nodes in (graph.starts, waits):
        for last, node in pairwise(nodes):
            if not _depends(node, last):
                yield f"it does not depend on the gather before it, '{last.name}'", node


def _depends(gather: fx.Node, earlier: fx.Node) -> bool:
    """Returns whether the start of a gather, or a wait, depends on ``earlier`` through others."""
    pending = [gather]
    seen = set()
    while pending:
        node = pending.pop()
        if node is earlier:
            return True
        seen.add(node)
        is_gather = node.target in WAITS or node.target is ops.all_gather_start.default
        sources = [each for each in node.args if isinstance(each, fx.Node) and each not in seen]
        pending += [each for each in sources if is_gather or each.target in WAITS]  # its token
    return False


@_invariant("each gradient is reduced exactly once, with its parameter's contract")
def _reductions_once(graph: Rewritten, before: State) -> Iterator[Violation]:
    counts = dict.fromkeys(graph.gradients, 0)
    for node, placeholder in graph.reductions:
        if insert_reduces.__name__ not in graph.ran:
            yield f"reductions come with the pass '{insert_reduces.__name__}'", node
        facts = placeholder.meta.get(PARAMETER)
        if facts is None or facts.fqn not in counts:
            yield f"the graph computes no gradient of {described(placeholder)}", node
            continue
        counts[facts.fqn] += 1
        contract, found = _C.contract_name(facts.leaf_dtype), node.kwargs.get("contract")
        if found != contract:
            yield f"the contract of '{facts.fqn}' is {contract!r}, and here {found!r}", node
        if counts[facts.fqn] > 1:
            yield f"the gradient of '{facts.fqn}' is reduced twice", node
    for fqn, count in counts.items():
        if count == 0 and insert_reduces.__name__ in graph.ran:
            yield f"the gradient of '{fqn}' is not reduced", None


@_invariant(
    "gradients, and later inputs of reductions, do not change: the runtime casts and scales them"
)
def _gradients(graph: Rewritten, before: State) -> Iterator[Violation]:
    is_early = insert_reduces.__name__ not in graph.ran and "gradient_nodes" not in graph.changes
    for position in graph.gradient_positions if is_early else ():
        if graph.results[position] is not (was := before.results[position]):
            yield f"result {position}, a gradient, was '{was}'", graph.output
    for node, placeholder in graph.reductions if before.reduced else []:
        fqn = fqn_of(placeholder)
        was, now = (before.reduced or {}).get(fqn), sources_of(node)
        if was is None or was == now:
            continue
        what = f"{', '.join(each.name for each in was[:-1])} of {was[-1]}"
        yield f"the gradient of '{fqn}' was {what}", node


@_invariant("reductions stay in their order")
def _reduction_order(graph: Rewritten, before: State) -> Iterator[Violation]:
    reduced = [fqn_of(placeholder) for _, placeholder in graph.reductions]
    if before.reduced is not None and reduced != list(before.reduced):
        yield f"reductions were {', '.join(before.reduced)}, and are {', '.join(reduced)}", None


@_invariant("each reduction takes the token of the one before it, so that no scheduler swaps them")
def _reductions_are_chained(graph: Rewritten, before: State) -> Iterator[Violation]:
    last = None
    for node in reductions_in(graph.gm.graph) if chain_reductions.__name__ in graph.ran else []:
        if last is not None and (len(node.args) < 3 or node.args[2] is not last):
            yield f"it does not take the token of the reduction before it, '{last.name}'", node
        last = node


@_invariant("a forward saves placeholders for backward, and the full tensors of what is kept alone")
def _frees_gathered(graph: Rewritten, before: State) -> Iterator[Violation]:
    kept, origin, results = graph.kept, graph.origins(), graph.results
    for position in graph.saved:
        result, was = results[position], before.results[position]
        if result is was:
            continue
        node, had = origin(result), before.origins[position]
        is_full = node is not None and result is not node and node not in kept
        # A partitioner may save a view of a parameter.
        if node is not None and is_full and (had is not node or was is had):
            yield f"the full {described(node)} is saved for backward", graph.output
        if had is not None and was is had and had not in kept:
            yield f"result {position} was the placeholder of {described(had)}", graph.output


@_invariant("a pass writes to nothing that was there before it, nor to inputs of graphs it calls")
def _no_writes(graph: Rewritten, before: State) -> Iterator[Violation]:
    for gm in (graph.gm, *graph.regions):
        for node in gm.graph.nodes:
            written = writes_of(node)
            if not written or before.writes.get(node) == written:
                continue
            for each in written:
                if each in before.targets or each.op == "placeholder":
                    yield f"{described(graph.origins()(each) or each)} is written to", node


@_invariant("no result that is not saved shares memory that ranks share")
def _returns_no_views(graph: Rewritten, before: State) -> Iterator[Violation]:
    if clone_returned_views.__name__ not in graph.ran:
        return
    for position, result in enumerate(graph.results):
        base = base_of(result) if isinstance(result, fx.Node) else None
        if base is None or base.target is not operator.getitem or position in graph.saved:
            continue
        if base.all_input_nodes[0].target is ops.all_gather_views.default:
            yield f"result {position} is a view of '{base.name}'", graph.output


@_invariant("the predicted peak of gathered parameters does not grow")
def _gathered_peak(graph: Rewritten, before: State) -> Iterator[Violation]:
    peak = gathered_peak(graph.gm.graph) if before.peak else 0
    if peak > before.peak:
        yield f"the predicted peak was {before.peak} bytes, and is {peak}", None


def _listed(gather: list[tuple[str, str]]) -> str:
    return ", ".join(f"{fqn} ({format})" if format else fqn for fqn, format in gather)
