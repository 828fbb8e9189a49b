"""Markers: nodes that tell a partitioner what backward needs and what forward saves.

A pass over the joint graph inserts them, and passes over the forward and the backward drop them.
Each returns its first argument.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx


def needed_in_backward(
    gradient: torch.Tensor,
    gathered: Sequence[torch.Tensor],
    placeholders: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Returns ``gradient``. Its node makes the other arguments inputs of backward.

    The node reads a tangent, so a partitioner puts it into backward. It stays there until
    :func:`drop_needed_in_backward`.
    """
    return gradient


def is_needed_in_backward(node: fx.Node) -> bool:
    """Returns whether a backward has to gather its input ``node``, or reads it.

    Nodes that only mark it, as needed or as saved, do not count.
    """
    for user in node.users:
        if user.target not in _MARKERS:
            return True
        if user.target is needed_in_backward and node in cast(Any, user.args[1]):
            return True
        if user.args[0] is node and is_needed_in_backward(user):
            return True
    return False


def drop_needed_in_backward(gm: fx.GraphModule) -> None:
    """Removes ``needed_in_backward`` from a backward graph, whose inputs stay."""
    for node in gm.graph.find_nodes(op="call_function", target=needed_in_backward):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def saved_for_backward(value: torch.Tensor) -> torch.Tensor:
    """Returns ``value``. Its node makes forward save it, until :func:`drop_saved_markers`."""
    return value


def with_saved(output: torch.Tensor, saved: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns ``output``. Its node shows a partitioner that forward has the saved values.

    It stays in a graph until :func:`drop_saved_markers`.
    """
    return output


_MARKERS = (needed_in_backward, saved_for_backward, with_saved)


def is_saved_for_backward(placeholder: fx.Node) -> bool:
    """Returns whether a forward graph saves ``placeholder`` by :func:`saved_for_backward`.

    A partitioner may leave that node to backward instead.
    """
    markers = [user for user in placeholder.users if user.target is saved_for_backward]
    return any(user.op == "output" for marker in markers for user in marker.users)


def drop_saved_markers(gm: fx.GraphModule) -> None:
    """Removes ``saved_for_backward`` from a graph. A forward then returns the values themselves."""
    for target in (with_saved, saved_for_backward):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
