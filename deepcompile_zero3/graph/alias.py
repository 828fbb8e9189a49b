"""Finds the nodes of a graph that share memory."""

import operator

import torch
from torch import fx

from deepcompile_zero3 import torch_internals


def views_of(node: fx.Node) -> set[fx.Node]:
    """Returns the nodes whose results share the memory of ``node``, directly or through others."""
    views = set()
    for user in node.users:
        if is_view(user):
            views |= {user, *views_of(user)}
    return views


def base_of(node: fx.Node) -> fx.Node:
    """Returns the node that owns the memory of ``node``.

    If an operator returns several results, the ``getitem`` of one of them owns its memory.
    """
    while is_view(node):
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and not is_view(source):
            break
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Returns whether the result of ``node`` shares the memory of its input.

    The ops of ``zero3`` do not count as views.
    """
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch_internals.OpOverload) or node.target.namespace == "zero3":
        return False
    if node.target is torch.ops.aten._unsafe_view.default:
        return True  # its schema does not say so
    returns = torch_internals.schema_of(node.target).returns
    return any(result.alias_info is not None for result in returns)


def untransposed(node: fx.Node) -> fx.Node:
    """Returns the node that ``node`` transposes twice, if nothing else reads it; else ``node``.

    Inductor removes such pairs. A graph that runs op by op still has them.
    """
    transpose = torch.ops.aten.t.default
    if node.target is not transpose:
        return node
    inner = node.all_input_nodes[0]
    if inner.target is not transpose or len(inner.users) > 1:
        return node
    source = inner.all_input_nodes[0]
    return source if len(source.users) == 1 else node
