"""Inserts all-gathers ahead of first use into a partitioned graph, in a given order."""

import operator
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import fx

from deepcompile_zero3.graph.alias import views_of
from deepcompile_zero3.graph.metadata import PARAMETER
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops
from deepcompile_zero3.torch_internals import compiler

_OF_PLACEHOLDERS = (ops.all_gather_start.default, *WAITS)


def reads(user: fx.Node, placeholder: fx.Node) -> bool:
    """Returns whether ``user`` reads the parameter's data.

    Collectives take ``placeholder`` to name the parameter. A reduction reads it too if the
    parameter is the gradient, or a factor of it.
    """
    if user.target in REDUCTIONS:
        given: Any = user.args[0]
        return placeholder in (given if isinstance(given, list | tuple) else (given,))
    return user.target not in _OF_PLACEHOLDERS and PARAMETER not in user.meta


def insert_gathers(
    gm: fx.GraphModule,
    parameters: Mapping[fx.Node, ParameterFacts],
    bucket_bytes: int,
    keep: Set[fx.Node] = frozenset(),
    ahead: int = 1,
) -> None:
    """Inserts gathers of all ``parameters`` (by graph input), in their order.

    Neighbors of one process group share a collective of up to ``bucket_bytes``.

    The wait for a collective comes just before the first use of its tensors, or of a later
    collective's: uses may come in any order, collectives may not. Each start and wait also takes
    the handle or the token of another, in parentheses here, so that no scheduler starts a
    collective earlier or later. With ``ahead=1``::

        start 0
        start 1 (start 0)
        wait 0 (start 1)    first use of 0
        start 2 (wait 0)
        wait 1 (start 2)    first use of 1
        wait 2 (wait 1)     first use of 2

    ``ahead + 1`` collectives are alive at once. Those of one region count as one, and start one
    after the other.

    The compiler frees a gathered tensor after its last use. A forward saves placeholders for
    backward, which then gathers again. It saves the full tensors of the inputs in ``keep``.
    """
    graph = gm.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    first_place = graph.find_nodes(op="placeholder")[-1].next
    buckets = list(_buckets(parameters, bucket_bytes))
    places = []
    place = graph.output_node()
    for bucket in reversed(buckets):
        uses = [user for node in bucket for user in node.users if reads(user, node)]
        place = min([place, *uses], key=order.__getitem__)
        places.append(place)
    places.reverse()
    batches = _batches(places, buckets)
    after = token = None  # the node that the next start follows; the token of the latest wait
    in_flight: deque[list[fx.Node]] = deque()  # the starts of each batch
    for number, (place, batch) in enumerate([(first_place, []), *batches]):
        started = in_flight.popleft() if number > 0 else []
        with graph.inserting_before(place):
            latest = None
            first = 0 if number == 0 else number + ahead - 1
            for _, buckets_ahead in batches[first : number + ahead]:
                in_flight.append([])
                for bucket in buckets_ahead:
                    formats = [parameters[each].gather_format for each in bucket]
                    latest = after = _start(graph, bucket, formats, after)
                    in_flight[-1].append(latest)
            for start, bucket in zip(started, batch, strict=True):
                gathers_views = parameters[bucket[0]].gathers_views
                follows = latest if latest is not None and start is started[0] else token
                wait = _wait(graph, start, bucket, gathers_views, follows)
                if start is not started[-1] or number < len(batches):
                    token = _item(graph, wait, len(bucket), "token")
                names = [f"{node.name}_full" for node in bucket]
                full = [_item(graph, wait, position, name) for position, name in enumerate(names)]
                for node, item in zip(bucket, full, strict=True):
                    _replace(node, item, node in keep)  # may erase the node at the place
            after = token or after


def clone_returned_parameters(
    gm: fx.GraphModule, parameters: Mapping[fx.Node, ParameterFacts], saved: Set[int]
) -> None:
    """Makes a graph return copies of the ``parameters`` that its caller gets, and so read them.

    A placeholder has no data. Inductor takes ``w * torch.ones_like(w)`` for ``w``, for example, if
    a model returns it. Outputs that are saved for backward (``saved``, by position) stay.
    """
    graph = gm.graph
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    returned = [i for i, each in enumerate(results) if i not in saved and each in parameters]
    if not returned:
        return
    for position in returned:
        value = results[position]
        with graph.inserting_before(output):
            results[position] = graph.call_function(torch.ops.aten.clone.default, (value,))
        results[position].meta["val"] = torch.empty_like(value.meta["val"])
    compiler.set_results(graph, results)


def clone_returned_views(gm: fx.GraphModule, saved: Set[int]) -> None:
    """Copies the returned views of memory that ranks share: a caller may write to an output.

    Outputs that are saved for backward (``saved``, by position) are not copied.
    """
    graph = gm.graph
    output = graph.output_node()
    waits = graph.find_nodes(op="call_function", target=ops.all_gather_views.default)
    if not waits:
        return
    views = {view for wait in waits for view in views_of(wait)}
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for position, value in enumerate(results):
        if value in views and position not in saved:
            with graph.inserting_before(output):
                results[position] = graph.call_function(torch.ops.aten.clone.default, (value,))
            results[position].meta["val"] = torch.empty_like(value.meta["val"])
    compiler.set_results(graph, results)


def _buckets(
    parameters: Mapping[fx.Node, ParameterFacts], bucket_bytes: int
) -> Iterator[list[fx.Node]]:
    bucket: list[fx.Node] = []
    nbytes = 0
    for node, facts in parameters.items():
        first = parameters[bucket[0]] if bucket else facts
        joins = bucket and facts.process_group == first.process_group
        joins = joins and facts.gathers_views == first.gathers_views
        if not joins or nbytes + facts.nbytes > bucket_bytes:
            if bucket:
                yield bucket
            bucket, nbytes = [], 0
        bucket.append(node)
        nbytes += facts.nbytes
    if bucket:
        yield bucket


def _batches(
    places: list[fx.Node], buckets: list[list[fx.Node]]
) -> list[tuple[fx.Node, list[list[fx.Node]]]]:
    """Returns the places of waits with their buckets. A region waits for all of its own at once."""
    batches: list[tuple[fx.Node, list[list[fx.Node]]]] = []
    for place, bucket in zip(places, buckets, strict=True):
        if place.target is compiler.invoke_subgraph and batches and batches[-1][0] is place:
            batches[-1][1].append(bucket)
        else:
            batches.append((place, [bucket]))
    return batches


def _start(
    graph: fx.Graph, bucket: list[fx.Node], formats: list[str], after: fx.Node | None
) -> fx.Node:
    arguments: tuple = (bucket,) if after is None else (bucket, after)
    if any(formats):
        arguments = (bucket, after, ",".join(formats))
    start = graph.create_node(
        "call_function", ops.all_gather_start.default, arguments, name="all_gather"
    )
    start.meta["val"] = bucket[0].meta["val"].new_empty(1, dtype=torch.int64, device="cpu")
    return start


def _wait(
    graph: fx.Graph, start: fx.Node, bucket: list[fx.Node], as_views: bool, after: fx.Node | None
) -> fx.Node:
    op = ops.all_gather_views if as_views else ops.all_gather_wait
    arguments = (start, bucket) if after is None else (start, bucket, after)
    wait = graph.create_node("call_function", op.default, arguments, name="gathered")
    values = [node.meta["val"] for node in bucket]
    # A compiler does not write to views of a graph's input.
    fulls = values if as_views else map(torch.empty_like, values)
    wait.meta["val"] = [*fulls, values[0].new_empty(0)]
    return wait


def _item(graph: fx.Graph, source: fx.Node, position: int, name: str) -> fx.Node:
    item = graph.create_node("call_function", operator.getitem, (source, position), name=name)
    item.meta["val"] = source.meta["val"][position]
    return item


def _replace(placeholder: fx.Node, full: fx.Node, keep: bool) -> None:
    """Replaces ``placeholder`` by ``full`` in its users, and in the output if it is kept."""
    for user in list(placeholder.users):
        if user.target is ops.unshard.default:
            user.replace_all_uses_with(full)
            user.graph.erase_node(user)
        elif user.target in REDUCTIONS and reads(user, placeholder):
            put_in: Any = fx.map_arg(user.args[0], lambda n: full if n is placeholder else n)
            user.update_arg(0, put_in)
        elif reads(user, placeholder) and (keep or user.op != "output"):
            user.replace_input_with(placeholder, full)
