"""A partitioned graph: all-gathers before first use."""

import operator
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import fx

from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import ops


def insert_gathers(
    gm: fx.GraphModule,
    parameters: Mapping[fx.Node, ParameterFacts],
    bucket_bytes: int,
    at_the_start: Collection[fx.Node] = (),
) -> list[str]:
    """Gathers each of ``parameters`` (by graph input) just before its first use.

    Parameters whose first uses follow each other, of one group and up to ``bucket_bytes``
    together, share a collective. Nothing frees what was gathered: the compiler does, after the
    last use. An input that a forward saves for backward stays an input, so that backward gathers
    again, unless ``reshard_after_forward`` is False.

    Args:
        at_the_start: those to gather before anything else, of whichever group, used or not.

    Returns:
        The FQNs of the parameters that the graph's output keeps gathered.
    """
    graph = gm.graph
    order = {node: position for position, node in enumerate(graph.nodes)}
    start = next(node for node in graph.nodes if node.op != "placeholder")
    first_use = {
        node: min(uses, key=order.__getitem__)
        for node in parameters
        if (uses := [user for user in node.users if user.op != "output"])
    }
    first_use.update(dict.fromkeys(at_the_start, start))
    by_first_use = sorted(first_use, key=lambda n: (order[first_use[n]], n not in at_the_start))
    groups = {n: None if n in at_the_start else parameters[n].group for n in by_first_use}
    kept = []
    for bucket in _buckets(groups, parameters, bucket_bytes):
        first = first_use[bucket[0]]
        # Where two first uses lie close together, their order may depend on activation shapes.
        bucket.sort(key=lambda node: parameters[node].order)
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
    groups: Mapping[fx.Node, int | None],
    parameters: Mapping[fx.Node, ParameterFacts],
    bucket_bytes: int,
) -> Iterator[list[fx.Node]]:
    bucket: list[fx.Node] = []
    nbytes = 0
    for node, group in groups.items():
        joins = bucket and group == groups[bucket[0]]
        if not joins or nbytes + parameters[node].nbytes > bucket_bytes:
            if bucket:
                yield bucket
            bucket, nbytes = [], 0
        bucket.append(node)
        nbytes += parameters[node].nbytes
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
