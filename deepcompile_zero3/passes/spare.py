"""Finds parameters that backward does not need: they are in blocks that compute no gradient.

A frozen block ahead of all that is trained, and of all inputs that require a gradient, computes
values that autograd does not record. Nothing in backward reads its parameters, unless a partitioner
computes such a value again. FSDP2 has no reason to gather such a block in backward either: its
hooks are on outputs that require a gradient.

Dynamo's graph decides, before operations are decomposed. It has the same operations on all ranks
and for batches of all sizes.
"""

from collections.abc import Iterable, Iterator, Set

import torch
from torch import fx

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.graph.calls import bodies_of, inputs_of
from deepcompile_zero3.passes.blocks import IsBlock, blocks_around
from deepcompile_zero3.torch_internals import tree_leaves


def find_spared(
    gm: fx.GraphModule, parameters: Iterable[fx.Node], is_block: IsBlock
) -> set[fx.Node]:
    """Returns the ``parameters`` that are used only in blocks in which nothing requires a gradient.

    Args:
        gm: Dynamo's graph, after ``lift_unshards``.
        parameters: the graph's inputs that are parameters.
        is_block: whether modules of a class are blocks. The innermost one around a use counts.
    """
    differentiated = set(_differentiated_blocks(gm, is_block))
    return {node for node in parameters if _is_spared(gm, node, differentiated, is_block)}


def _differentiated_blocks(
    gm: fx.GraphModule, is_block: IsBlock, inside: bool = False
) -> Iterator[tuple[str, type]]:
    """Yields the names and classes of blocks in which something requires a gradient.

    A call that returns such a result, of a checkpoint for example, may run its body again in
    backward. So everything in the body counts (``inside``).
    """
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        counts = inside or _requires_grad(node)
        if counts:
            yield from blocks_around(node, is_block)
        for body in bodies_of(gm, node):
            yield from _differentiated_blocks(body, is_block, counts)


def _is_spared(
    gm: fx.GraphModule, node: fx.Node, differentiated: Set[tuple[str, type]], is_block: IsBlock
) -> bool:
    for user in node.users:
        if isinstance(user.target, torch_internals.HigherOrderOperator):
            bodies = bodies_of(gm, user)
            read = inputs_of(bodies[0], user, node) if len(bodies) == 1 else []
            if not read or not all(
                _is_spared(bodies[0], each, differentiated, is_block) for each in read
            ):
                return False
        elif not (around := blocks_around(user, is_block)) or around[-1] in differentiated:
            return False
    return bool(node.users)


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if value is None:  # a higher-order operator, whose results have values
        return any(_requires_grad(user) for user in node.users if user.op != "output")
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in tree_leaves(value))
