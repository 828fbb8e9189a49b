"""A partitioned graph: all-gathers before first use, in an order that is given."""

import operator
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import ops


def insert_gathers(
    gm: fx.GraphModule, parameters: Mapping[fx.Node, ParameterFacts], bucket_bytes: int
) -> list[str]:
    """Gathers all of ``parameters`` (by graph input), in their order.

    Neighbours of one group, up to ``bucket_bytes`` together, share a collective. Each stands just
    before the first use of what it gathers or of what a later one does: uses may come in another
    order, collectives do not. Nothing frees what was gathered: the compiler does, after the last
    use. An input that a forward saves for backward stays an input, so that backward gathers again,
    unless ``reshard_after_forward`` is False.

    Returns:
        The FQNs of the parameters that the graph's output keeps gathered.
    """
    graph = gm.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    buckets = list(_buckets(parameters, bucket_bytes))
    places = []
    place = graph.output_node()
    for bucket in reversed(buckets):
        uses = [user for node in bucket for user in node.users]
        place = min([place, *uses], key=order.__getitem__)
        places.append(place)
    kept = []
    for bucket, first in zip(buckets, reversed(places), strict=True):
        with graph.inserting_before(first):
            fqns = [parameters[node].fqn for node in bucket]
            gather = graph.create_node(
                "call_function", ops.all_gather.default, (bucket, fqns), name="all_gather"
            )
            token = bucket[0].meta["val"].new_empty(0)
            values = [torch.empty_like(node.meta["val"]) for node in bucket]
            gather.meta["val"] = [*values, token]
            for position, node in enumerate(bucket):
                full = graph.create_node(
                    "call_function",
                    operator.getitem,
                    (gather, position),
                    name=fqns[position].replace(".", "_"),
                )
                full.meta["val"] = values[position]
                if _replace(node, full, gather, not parameters[node].reshard_after_forward):
                    kept.append(fqns[position])
    graph.lint()
    gm.recompile()
    return kept


def _buckets(
    parameters: Mapping[fx.Node, ParameterFacts], bucket_bytes: int
) -> Iterator[list[fx.Node]]:
    bucket: list[fx.Node] = []
    nbytes = 0
    for node, facts in parameters.items():
        joins = bucket and facts.group == parameters[bucket[0]].group
        if not joins or nbytes + facts.nbytes > bucket_bytes:
            if bucket:
                yield bucket
            bucket, nbytes = [], 0
        bucket.append(node)
        nbytes += facts.nbytes
    if bucket:
        yield bucket


def _replace(placeholder: fx.Node, full: fx.Node, gather: fx.Node, keep: bool) -> bool:
    """Lets ``full`` be used in place of ``placeholder``; returns whether the output keeps it."""
    kept = False
    for user in list(placeholder.users):
        if user.target is ops.unshard.default:
            user.replace_all_uses_with(full)
            user.graph.erase_node(user)
        elif user.op == "output":
            kept = keep
            if keep:
                user.replace_input_with(placeholder, full)
        elif user is not gather:
            user.replace_input_with(placeholder, full)
    return kept
