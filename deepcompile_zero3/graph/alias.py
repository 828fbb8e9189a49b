"""Whose memory a node's result is."""

import operator

import torch
from torch import fx


def views_of(node: fx.Node) -> set[fx.Node]:
    """The nodes whose results share the memory of ``node``, directly or through others."""
    views = set()
    for user in node.users:
        if is_view(user):
            views |= {user, *views_of(user)}
    return views


def base_of(node: fx.Node) -> fx.Node:
    """What owns the memory of ``node``; of an operator with several results, the one of them."""
    while is_view(node):
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and not is_view(source):
            break
        node = source
    return node


def is_view(node: fx.Node) -> bool:
    """Whether its result shares the memory of what it is given. What is gathered does not."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "zero3":
        return False
    return any(result.alias_info is not None for result in node.target._schema.returns)
