"""Finds the blocks of a model in Dynamo's graph."""

from collections.abc import Callable
from typing import TypeAlias

from torch import fx

IsBlock: TypeAlias = Callable[[type], bool]  # whether modules of a class are blocks


def blocks_around(node: fx.Node, is_block: IsBlock) -> list[tuple[str, type]]:
    """Returns the names and classes of the blocks that an operation is in, outermost first."""
    return [
        (name, cls)
        for name, cls in (node.meta.get("nn_module_stack") or {}).values()
        if isinstance(cls, type) and is_block(cls)
    ]
