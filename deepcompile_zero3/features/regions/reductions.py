"""Moves reductions into the regions whose gradients they take."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from deepcompile_zero3.graph.alias import is_view
from deepcompile_zero3.graph.calls import arguments_of, calls_by_region, region_named, results_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.graph_pass import GraphPass, own_pass
from deepcompile_zero3.passes.reduce import CASTS
from deepcompile_zero3.passes.region_results import results_in, return_from, value_of
from deepcompile_zero3.runtime import REDUCTIONS
from deepcompile_zero3.torch_internals import compiler

# What regions compute too, beside views: products that left them, and casts of gradients.
_COMPUTED = (torch.ops.aten.mm.default, *CASTS)


def reduce_in_regions(gm: fx.GraphModule) -> None:
    """Moves the reductions that follow each call of a region into the region.

    A compiler's work outside of regions grows with the number of calls, and of what it finds there
    in a backward graph, reductions and their operands are half. Gradients are reduced in the same
    order, at the same places.

    A region keeps its reductions outside if its calls differ in them, if others come in between, if
    a gradient is none of the call's results and no product, cast or view of what the call has, or
    if nothing follows the last of them: a compiler would delete a call whose result is not read.

    Args:
        gm: a rewritten graph whose reductions are chained.
    """
    if not calls_by_region(gm):
        return
    gm.graph.eliminate_dead_code()  # here, so that no call is deleted below
    following = _reductions_by_call(gm.graph)
    for name, calls in calls_by_region(gm).items():
        count = min(len(following[call]) for call in calls)  # outer parameters may follow the last
        found = (_tail_of(call, following[call][:count]) for call in calls)
        tails = [tail for tail in found if tail is not None]
        if len(tails) < len(calls) or any(tail.kinds != tails[0].kinds for tail in tails):
            continue
        region = region_named(gm, name)
        last = _copied_into(region, calls[0], tails[0])
        results = [*results_in(region), last]
        for call, tail in zip(calls, tails, strict=True):
            _pass_to(call, tail, len(results) - 1)
        gm.graph.eliminate_dead_code()
        used = {position for call in calls for position, _ in results_of(call)}
        return_from(region, [r if i in used else None for i, r in enumerate(results)], calls)
        compiler.keep_strides(region.graph, range(len(results)))
    gm.recompile()  # Inductor finds a stored graph by its code


def passes(parameters: Sequence[Any], share: float, options: Options) -> list[GraphPass]:
    """Returns the pass over the graphs of ``parameters``."""
    return [
        own_pass(
            reduce_in_regions,
            lambda gm, _: reduce_in_regions(gm),
            graphs=("lowered",),
            changes=("regions", "gradients", "reductions_are_chained"),
            uuid=(),
        )
    ]


class _Tail(NamedTuple):
    """The reductions that follow a call.

    Attributes:
        reductions: the reductions, in their order.
        kinds: equal for calls whose reductions a region can have in common.
    """

    reductions: list[fx.Node]
    kinds: list[tuple]


def _reductions_by_call(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Returns the reductions between each call of a region and the next one.

    These are without those whose operands are made of something that the call does not have.
    """
    result: dict[fx.Node, list[fx.Node]] = {}
    call = None
    for node in graph.nodes:
        if node.target is compiler.invoke_subgraph:
            call = node
            result[call] = []
        elif call is None or node.target not in REDUCTIONS:
            continue
        elif _kind(node.args[0], call) is not None:
            result[call].append(node)
    return result


def _tail_of(call: fx.Node, reductions: list[fx.Node]) -> _Tail | None:
    if not reductions or not reductions[-1].users:
        return None
    follows = all(_after(b) is a for a, b in itertools.pairwise(reductions))
    before = _after(reductions[0])
    if not follows or (before is not None and before > call):
        return None
    before = before or reductions[-1]  # a token of that kind can be made
    kinds = [
        (r.target, _kind(r.args[0], call), r.args[3:], r.kwargs, _layout(r.args[1]))
        for r in reductions
    ]
    return _Tail(reductions, [_layout(before), *kinds])


def _placeholders_of(tail: _Tail) -> list[Any]:
    return [reduction.args[1] for reduction in tail.reductions]


def _after(reduction: fx.Node) -> Any:
    """Returns the token that a reduction takes, or None."""
    return reduction.args[2] if len(reduction.args) > 2 else None


def _kind(value: Any, call: fx.Node) -> Any:
    """Returns how ``value`` is made of arguments and results of ``call``, or None if it is not."""
    if isinstance(value, (list, tuple)):
        parts = [_kind(each, call) for each in value]
        return None if None in parts else tuple(parts)
    if not isinstance(value, fx.Node):
        return ("constant", value)
    arguments = arguments_of(call)
    if value in arguments:
        return ("argument", arguments.index(value))
    if value.target is operator.getitem and value.args[0] is call:
        return ("result", value.args[1])
    if not is_view(value) and (value.target not in _COMPUTED or len(value.users) > 1):
        return None
    parts = _kind(value.args, call)
    return None if parts is None else (value.target, parts, value.kwargs)


def _layout(node: Any) -> tuple:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype, value.device


def _copied_into(region: fx.GraphModule, call: fx.Node, tail: _Tail) -> fx.Node:
    """Appends the reductions of a call to the region. Returns the last one."""
    graph = region.graph
    inputs = graph.find_nodes(op="placeholder")
    results = results_in(region)
    inside: dict[fx.Node, fx.Node] = {item: results[i] for i, item in results_of(call)}
    for argument, node in zip(arguments_of(call), inputs, strict=True):
        inside.setdefault(argument, node)
    given: list[fx.Node] = []
    with graph.inserting_before(inputs[-1].next):
        for each in [tail.reductions[-1], *_placeholders_of(tail)]:
            given.append(graph.placeholder(f"reduced_{len(given)}"))
            given[-1].meta["val"] = each.meta["val"]
    last, *placeholders = given

    def copied(node: fx.Node) -> fx.Node:
        if node not in inside:
            map_arg(node.args, copied)  # in front of what reads them
            inside[node] = graph.node_copy(node, inside.__getitem__)
            inside[node].meta = {"val": value_of(inside[node])}
        return inside[node]

    with graph.inserting_before(graph.output_node()):
        for reduction, placeholder in zip(tail.reductions, placeholders, strict=True):
            source = map_arg(reduction.args[0], copied)
            args = source, placeholder, last, *reduction.args[3:]
            last = graph.call_function(cast(Any, reduction.target), args, reduction.kwargs)
            last.meta["val"] = reduction.meta["val"]
    return last


def _pass_to(call: fx.Node, tail: _Tail, position: int) -> None:
    """Appends the arguments that the reductions in a region need to a call, and erases its own."""
    graph = call.graph
    before = _after(tail.reductions[0])
    if before is None:
        value = tail.reductions[-1].meta["val"]
        settings = {"dtype": value.dtype, "device": value.device}
        with graph.inserting_before(call):
            before = graph.call_function(torch.ops.aten.empty.memory_format, ([0],), settings)
        before.meta["val"] = value.new_empty(0)
    call.args = (*call.args, before, *_placeholders_of(tail))
    call.meta.pop("eager_input_vals", None)
    with graph.inserting_after(call):
        token = graph.call_function(operator.getitem, (call, position))
    token.meta["val"] = tail.reductions[-1].meta["val"]
    for reduction in reversed(tail.reductions):
        reduction.replace_all_uses_with(token)  # a load may wait for any of them
        graph.erase_node(reduction)
