"""A partitioned graph: all-gathers ahead of first use, in an order that is given."""

import operator
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import fx

from deepcompile_zero3.graph.alias import views_of
from deepcompile_zero3.graph.metadata import PARAMETER
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops

_OF_PLACEHOLDERS = (ops.all_gather_start.default, *WAITS, *REDUCTIONS)


def _knows_by(user: fx.Node) -> bool:
    """Whether it only knows the parameter by a placeholder, and reads nothing."""
    return user.target in _OF_PLACEHOLDERS or PARAMETER in user.meta


def insert_gathers(
    gm: fx.GraphModule,
    parameters: Mapping[fx.Node, ParameterFacts],
    bucket_bytes: int,
    keep: Set[fx.Node] = frozenset(),
) -> None:
    """Gathers all of ``parameters`` (by graph input), in their order.

    Neighbours of one process group, up to ``bucket_bytes`` together, share a collective. It is
    waited for just before the first use of what it gathers or of what a later one does: uses may
    come in another order, collectives do not. It starts just before the wait for the one ahead of
    it, which takes what the start returned, so that no scheduler starts it later, and it takes a
    token of the wait before that, so that none starts it earlier: two are alive at once. Nothing
    frees what was gathered: the compiler does, after the last use. An input that a forward saves
    for backward stays one, so that backward gathers again, unless it is among those to ``keep``.
    """
    graph = gm.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    first_place = next(node for node in graph.nodes if node.op != "placeholder")
    buckets = list(_buckets(parameters, bucket_bytes))
    places = []
    place = graph.output_node()
    for bucket in reversed(buckets):
        uses = [user for node in bucket for user in node.users if not _knows_by(user)]
        place = min([place, *uses], key=order.__getitem__)
        places.append(place)
    places.reverse()
    after = None  # what the next start follows
    started = []
    for index, place in enumerate([first_place, *places]):
        with graph.inserting_before(place):
            if index < len(buckets):
                started.append(_start(graph, buckets[index], after))
            if index == 0:
                after = started[0] if started else None
                continue
            bucket = buckets[index - 1]
            shared = parameters[bucket[0]].shared
            wait = _wait(graph, started[index - 1], bucket, shared, started[index:])
            if index + 1 < len(buckets):
                after = _item(graph, wait, len(bucket), "token")
            names = [f"{node.name}_full" for node in bucket]
            full = [_item(graph, wait, position, name) for position, name in enumerate(names)]
            for node, item in zip(bucket, full, strict=True):
                _replace(node, item, node in keep)  # which may erase what stands at the place
    graph.lint()
    gm.recompile()


def own_outputs(gm: fx.GraphModule, saved: Set[int]) -> None:
    """Copies what a forward returns of memory that ranks share, but for what it saves for backward
    (by position in the output): to the caller it is a tensor like any other.
    """
    graph = gm.graph
    output = graph.output_node()
    waits = graph.find_nodes(op="call_function", target=ops.all_gather_views.default)
    if not waits:
        return
    shared = {view for wait in waits for view in views_of(wait)}
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for position, value in enumerate(results):
        if value in shared and position not in saved:
            with graph.inserting_before(output):
                results[position] = graph.call_function(torch.ops.aten.clone.default, (value,))
            results[position].meta["val"] = torch.empty_like(value.meta["val"])
    output.args = (tuple(results),)
    gm.recompile()


def _buckets(
    parameters: Mapping[fx.Node, ParameterFacts], bucket_bytes: int
) -> Iterator[list[fx.Node]]:
    bucket: list[fx.Node] = []
    nbytes = 0
    for node, facts in parameters.items():
        first = parameters[bucket[0]] if bucket else facts
        joins = bucket and (facts.group, facts.shared) == (first.group, first.shared)
        if not joins or nbytes + facts.nbytes > bucket_bytes:
            if bucket:
                yield bucket
            bucket, nbytes = [], 0
        bucket.append(node)
        nbytes += facts.nbytes
    if bucket:
        yield bucket


def _start(graph: fx.Graph, bucket: list[fx.Node], after: fx.Node | None) -> fx.Node:
    arguments = (bucket,) if after is None else (bucket, after)
    start = graph.create_node(
        "call_function", ops.all_gather_start.default, arguments, name="all_gather"
    )
    start.meta["val"] = bucket[0].meta["val"].new_empty(1, dtype=torch.int64, device="cpu")
    return start


def _wait(
    graph: fx.Graph, start: fx.Node, bucket: list[fx.Node], shared: bool, ahead: list[fx.Node]
) -> fx.Node:
    op = ops.all_gather_views if shared else ops.all_gather_wait
    wait = graph.create_node("call_function", op.default, (start, bucket, *ahead), name="gathered")
    values = [node.meta["val"] for node in bucket]
    # To a compiler, views of a graph's input are what it may not write to.
    fulls = values if shared else map(torch.empty_like, values)
    wait.meta["val"] = [*fulls, values[0].new_empty(0)]
    return wait


def _item(graph: fx.Graph, source: fx.Node, position: int, name: str) -> fx.Node:
    item = graph.create_node("call_function", operator.getitem, (source, position), name=name)
    item.meta["val"] = source.meta["val"][position]
    return item


def _replace(placeholder: fx.Node, full: fx.Node, keep: bool) -> None:
    """Lets ``full`` be used in place of ``placeholder``, by the output too if it is to be kept."""
    for user in list(placeholder.users):
        if user.target is ops.unshard.default:
            user.replace_all_uses_with(full)
            user.graph.erase_node(user)
        elif not _knows_by(user) and (keep or user.op != "output"):
            user.replace_input_with(placeholder, full)
