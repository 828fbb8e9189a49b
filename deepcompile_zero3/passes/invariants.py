"""The invariants of rewritten graphs: what holds after every pass, of ours or of the user's.

``INVARIANTS`` has them, each with its promise as a sentence. The order matters: a check may rely on
what those before it have found.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import fx

from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.graph.metadata import KEPT_OF, PARAMETER, formats_of
from deepcompile_zero3.graph.peak import gathered_peak
from deepcompile_zero3.passes.gather import only_identifies
from deepcompile_zero3.passes.rewritten import (
    Rewritten,
    State,
    described,
    fqn_of,
    gathers_of,
    kind_of,
    reduced_by,
    writes_of,
)
from deepcompile_zero3.runtime import _C, REDUCTIONS, WAITS, ops

# What is broken, and the node that breaks it, if it is one.
Violation: TypeAlias = tuple[str, fx.Node | None]
_Check: TypeAlias = Callable[[Rewritten, State], Iterator[Violation]]

# Name of each invariant: its promise, and what yields the places where it is broken.
INVARIANTS: dict[str, tuple[str, _Check]] = {}

_OURS = (ops.all_gather_start.default, *WAITS, *REDUCTIONS)


def _invariant(promise: str) -> Callable[[_Check], _Check]:
    def decorate(check: _Check) -> _Check:
        INVARIANTS[check.__name__.removeprefix("_")] = promise, check
        return check

    return decorate


@_invariant("each node follows those that it uses, and has the fake tensor of its result")
def _well_formed(graph: Rewritten, before: State) -> Iterator[Violation]:
    known: set[fx.Node] = set()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in known:
                yield f"'{source.name}' is used before it is computed", node
        known.add(node)
        if node in before.nodes or node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":
            yield "a graph has no attributes: use an operator that returns the tensor", node
        elif node.op != "call_function":
            yield f"a node calls a function, and this is a {node.op}", node
        elif "val" not in node.meta:
            yield "a new node has no meta['val'], the fake tensor of its result", node
        elif node.target in _OURS and set(node.kwargs) - {"contract"}:
            yield "arguments of this operator are given by position, but for the contract", node
    try:
        graph.gm.graph.lint()
    except (RuntimeError, ValueError) as error:
        yield str(error), None


@_invariant("a graph keeps its inputs, and the number, dtypes, shapes and devices of its results")
def _signature(graph: Rewritten, before: State) -> Iterator[Violation]:
    if graph.inputs != before.inputs:
        gone = [node.name for node in before.inputs if node not in graph.inputs]
        yield f"inputs were {'removed: ' + ', '.join(gone) if gone else 'added or moved'}", None
    if not isinstance(graph.gm.graph.output_node().args[0], list | tuple):
        yield "it returns one node, and returned a list", graph.gm.graph.output_node()
        return
    kinds = list(map(kind_of, graph.results))
    if len(kinds) != len(before.kinds):
        yield f"it returns {len(kinds)} results, and returned {len(before.kinds)}", None
        return
    for position, (now, then) in enumerate(zip(kinds, before.kinds, strict=True)):
        if now != then:
            what = f"result {position} was {then} and is {now}"
            yield what, graph.gm.graph.output_node()


@_invariant("what is kept for backward is chosen ahead of the gathers, among what may be kept")
def _kept(graph: Rewritten, before: State) -> Iterator[Violation]:
    for node in graph.inputs:
        is_kept = node in graph.kept
        if is_kept and node not in graph.may_keep:
            yield "it is marked to be kept gathered, and may not be", node
        if node in graph.may_keep and graph.has_gathers and is_kept != (node in before.kept):
            yield "its mark has changed, and the gathers were inserted already", node
        if node in graph.may_keep and not is_kept and _must_be_kept(node):
            yield "it has reshard_after_forward=False, and is not kept", node


def _must_be_kept(node: fx.Node) -> bool:
    return node.meta[PARAMETER].reshard_after_forward is False


@_invariant("each gather is started once and waited for once, with the same parameters")
def _gathers_are_paired(graph: Rewritten, before: State) -> Iterator[Violation]:
    for start in graph.starts:
        if not graph.has_gathers:
            yield "gathers come with the pass 'insert_gathers'", start
        waits = [user for user in start.users if user.target in WAITS and user.args[0] is start]
        placeholders: Any = start.args[0]
        if len(waits) != 1:
            yield f"{len(waits)} nodes wait for a gather, and one must", start
        elif list(waits[0].args[1]) != list(placeholders):  # type: ignore[arg-type]
            yield "it waits for other parameters than its gather starts", waits[0]
        else:
            for item in waits[0].users:
                number: Any = item.args[1]
                if item.target is operator.getitem and not 0 <= number <= len(placeholders):
                    yield f"the gather has {len(placeholders)} parameters and a token", item
        if len(formats_of(start)) != len(placeholders):
            yield "it has another number of formats than of parameters", start
        for node in placeholders:
            if PARAMETER not in node.meta:
                yield f"'{node.name}' is gathered, and is no parameter", start


@_invariant("a parameter is read as gathered, never by its placeholder")
def _gathers_before_reads(graph: Rewritten, before: State) -> Iterator[Violation]:
    if not graph.has_gathers:
        return
    for node in graph.inputs:
        facts = node.meta.get(PARAMETER)
        if facts is None or not facts.is_gathered:
            continue
        for user in node.users:
            if user.op != "output" and not only_identifies(user):
                yield f"'{facts.fqn}' is read by its placeholder, which has no data", user
    for position, result in enumerate(graph.results):
        if isinstance(result, fx.Node) and result in before.inputs and position not in graph.saved:
            facts = result.meta.get(PARAMETER)
            if facts is not None and facts.is_gathered and result is not before.results[position]:
                what = f"the placeholder of '{facts.fqn}', which has no data, is result {position}"
                yield what, graph.gm.graph.output_node()


@_invariant("the same parameters are gathered in the same format, each once: other ranks wait")
def _same_gathers(graph: Rewritten, before: State) -> Iterator[Violation]:
    if before.gathers is None:
        return
    was = sorted(each for gather in before.gathers for each in gather)
    now = sorted(each for gather in gathers_of(graph) for each in gather)
    if was != now:
        yield f"{_listed(was) or 'none'} were gathered, and {_listed(now) or 'none'} are", None


@_invariant("gathers stay in their order and their buckets")
def _gather_order(graph: Rewritten, before: State) -> Iterator[Violation]:
    now = gathers_of(graph)
    if before.gathers is not None and now != before.gathers:
        texts = [
            ", ".join(f"[{_listed(each)}]" for each in gathers) for gathers in (before.gathers, now)
        ]
        yield f"gathers were {texts[0]}, and are {texts[1]}", None


@_invariant("each gather depends on the one before it, so that no scheduler swaps them")
def _gathers_are_chained(graph: Rewritten, before: State) -> Iterator[Violation]:
    last = None
    for start in graph.starts:
        if last is not None and not _depends(start, last):
            yield f"it does not depend on the gather before it, '{last.name}'", start
        last = start


def _depends(start: fx.Node, earlier: fx.Node) -> bool:
    """Returns whether the start of a gather depends on ``earlier`` through gathers alone."""
    pending = [start]
    seen = set()
    while pending:
        node = pending.pop()
        if node is earlier:
            return True
        seen.add(node)
        is_gather = node.target in WAITS or node.target is ops.all_gather_start.default
        sources = [each for each in node.args if isinstance(each, fx.Node)]
        # A token is an item of a wait.
        pending += [
            each for each in sources if each not in seen and (is_gather or each.target in WAITS)
        ]
    return False


@_invariant("each gradient is reduced exactly once, as it was computed, with its contract")
def _reductions_once(graph: Rewritten, before: State) -> Iterator[Violation]:
    counts = dict.fromkeys(graph.gradients, 0)
    for node in graph.reductions:
        if not graph.has_reductions:
            yield "reductions come with the pass 'insert_reduces'", node
        placeholder: Any = node.args[1]
        facts = placeholder.meta.get(PARAMETER)
        if facts is None or facts.fqn not in counts:
            yield f"the graph computes no gradient of {described(placeholder, {})}", node
            continue
        counts[facts.fqn] += 1
        contract, found = _C.contract_name(facts.leaf_dtype), node.kwargs.get("contract")
        if found != contract:
            yield f"the contract of '{facts.fqn}' is {contract!r}, and here {found!r}", node
        if counts[facts.fqn] > 1:
            yield f"the gradient of '{facts.fqn}' is reduced twice", node
        was = (before.reduced or {}).get(facts.fqn)
        if was is None:
            continue
        now = reduced_by(node)
        if was.source in graph.gm.graph.nodes and not _computed_of(now.source, was.source):
            yield f"the gradient of '{facts.fqn}' was computed by '{was.source.name}'", node
        if was.shape and now.shape and was.shape != now.shape:
            yield f"the gradient of '{facts.fqn}' had the shape {was.shape}", node
    for fqn, count in counts.items():
        if count == 0 and graph.has_reductions:
            yield f"the gradient of '{fqn}' is not reduced", None


def _computed_of(node: fx.Node, source: fx.Node) -> bool:
    """Returns whether ``node`` is ``source`` or computed of it."""
    pending = [node]
    seen = set()
    while pending:
        each = pending.pop()
        if each is source:
            return True
        if each not in seen:
            seen.add(each)
            pending += each.all_input_nodes
    return False


@_invariant(
    "a gradient arrives at its reduction in the dtype it was computed in: the runtime casts"
)
def _grad_dtypes(graph: Rewritten, before: State) -> Iterator[Violation]:
    for node in graph.reductions if before.reduced else []:
        was, now = (before.reduced or {})[fqn_of(node)].dtype, reduced_by(node).dtype
        if was != now:
            yield f"the gradient of '{fqn_of(node)}' was {was} and is {now}", node


@_invariant("reductions stay in their order")
def _reduction_order(graph: Rewritten, before: State) -> Iterator[Violation]:
    reduced = [fqn_of(node) for node in graph.reductions]
    if before.reduced is not None and reduced != list(before.reduced):
        yield f"reductions were {', '.join(before.reduced)}, and are {', '.join(reduced)}", None


@_invariant("each reduction takes the token of the one before it, so that no scheduler swaps them")
def _reductions_are_chained(graph: Rewritten, before: State) -> Iterator[Violation]:
    last = None
    for node in graph.reductions if graph.is_chained else []:
        if last is not None and (len(node.args) < 3 or node.args[2] is not last):
            yield f"it does not take the token of the reduction before it, '{last.name}'", node
        last = node


@_invariant("a forward saves placeholders for backward, and the full tensors of what is kept alone")
def _frees_gathered(graph: Rewritten, before: State) -> Iterator[Violation]:
    gathered = graph.gathered if graph.saved else {}
    output = graph.gm.graph.output_node()
    for position in graph.saved:
        result, was = graph.results[position], before.results[position]
        node = gathered.get(base_of(result)) if isinstance(result, fx.Node) else None
        if node is not None and node not in graph.kept:
            yield f"the full {described(node, {})} is saved for backward", output
        is_placeholder = (
            isinstance(was, fx.Node) and was.op == "placeholder" and PARAMETER in was.meta
        )
        if is_placeholder and result is not was and was not in graph.kept:
            yield f"result {position} was the placeholder of {described(was, {})}", output


@_invariant("a pass writes to nothing that was there before it, nor to a region's inputs")
def _no_writes(graph: Rewritten, before: State) -> Iterator[Violation]:
    for node in graph.nodes:
        if node in before.nodes:
            continue
        for each in writes_of(node):
            if each in before.nodes or each.op == "placeholder" or KEPT_OF in each.meta:
                yield f"{described(each, graph.gathered)} is written to", node


@_invariant("the predicted peak of gathered parameters does not grow")
def _gathered_peak(graph: Rewritten, before: State) -> Iterator[Violation]:
    peak = gathered_peak(graph.gm.graph) if before.peak else 0
    if peak > before.peak:
        yield f"the predicted peak was {before.peak} bytes, and is {peak}", None


def _listed(gather: list[tuple[str, str]]) -> str:
    return ", ".join(f"{fqn} ({format})" if format else fqn for fqn, format in gather)
