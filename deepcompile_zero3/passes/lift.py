"""Replaces ``unshard(placeholder)`` in Dynamo's graph by the placeholder itself.

After lifting, AOTAutograd traces the plain single-device model with the placeholder as its primal.
The partitioner saves the placeholder for backward, a graph input that costs nothing.
"""

from typing import Any

import torch
from torch import fx

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.graph.calls import graph_modules
from deepcompile_zero3.runtime import ops


def lift_unshards(gm: fx.GraphModule) -> bool:
    """Replaces each ``zero3.unshard`` by its placeholder, in nested graphs too.

    An ``unshard`` stays if the top graph returns its result, or a view of it: a placeholder has no
    memory to return.

    Returns whether any was replaced.
    """
    escaping = _storages_of_outputs(gm.graph)
    lifted = False
    for nested in graph_modules(gm):
        for node in nested.graph.find_nodes(op="call_function", target=ops.unshard.default):
            if _storage(node) in escaping:
                node.args = (*node.args[:2], True)  # passes know placeholders, no ordinals
                continue
            node.replace_all_uses_with(node.args[0])
            nested.graph.erase_node(node)
            lifted = True
        for node in nested.graph.find_nodes(op="call_function", target=ops.unshard_as.default):
            node.target, node.args = attach, node.args[:2]
            lifted = True
        nested.graph.lint()
        nested.recompile()
    return lifted


class _Attach(torch.autograd.Function):
    """See :func:`attach`."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, placeholder: torch.Tensor) -> torch.Tensor:
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


def attach(full: torch.Tensor, placeholder: torch.Tensor) -> torch.Tensor:
    """Returns ``full``, made of gathered payloads. Its gradient becomes that of ``placeholder``."""
    return _Attach.apply(full, placeholder)


def uses_of(graph: fx.Graph) -> dict[fx.Node, tuple[tuple[int, ...], bool]]:
    """Returns where a lifted graph uses each of its inputs, and whether only to look up rows."""
    lookups = (torch.nn.functional.embedding, torch.embedding, torch.ops.aten.embedding.default)
    positions = {node: position for position, node in enumerate(graph.nodes)}
    uses = {}
    for node in graph.find_nodes(op="placeholder"):
        users = [user for user in node.users if user.op != "output"]
        uses[node] = (
            tuple(sorted(positions[user] for user in users)) or (len(positions),),
            bool(users) and all(user.target in lookups for user in users),
        )
    return uses


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return torch_internals.storage_address(value) if isinstance(value, torch.Tensor) else None


def _storages_of_outputs(graph: fx.Graph) -> set[int | None]:
    return {_storage(node) for node in graph.output_node().all_input_nodes} - {None}
