"""Predicts the peak of gathered parameters in a rewritten graph."""

import operator
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from torch import fx

from deepcompile_zero3.graph.alias import views_of
from deepcompile_zero3.runtime import ops


def gathered_peak(graph: fx.Graph) -> int:
    """Returns the peak in bytes of gathered parameters that are alive at once."""
    return max(gathered_bytes(graph))


def gathered_bytes(graph: fx.Graph) -> list[int]:
    """Returns the bytes of gathered parameters that are alive at each node.

    Nodes run in their order. A parameter takes memory from the start of its gather to its last use,
    or to the end of the graph if the graph returns it.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    changes = [0] * (len(order) + 1)  # the last one comes after the output
    for wait in graph.find_nodes(op="call_function", target=ops.all_gather_wait.default):
        start = wait.args[0]
        for _, item in gathered_items(wait):
            value = item.meta["val"]
            nbytes = value.numel() * value.element_size()
            changes[order[start]] += nbytes
            changes[max(order[user] for user in [item, *_uses(item)]) + 1] -= nbytes
    return list(accumulate(changes[:-1]))


def gathered_items(wait: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """Yields position and node of each full tensor that a wait returns. Skips the token."""
    placeholders: Any = wait.args[1]
    for item in wait.users:
        position: Any = item.args[1]
        if item.target is operator.getitem and position != len(placeholders):
            yield position, item


def _uses(node: fx.Node) -> set[fx.Node]:
    """Returns the nodes that read the memory of ``node``, directly or through views."""
    return {user for view in (node, *views_of(node)) for user in view.users}
