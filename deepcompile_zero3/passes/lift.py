"""Dynamo's graph: from ``unshard(placeholder)`` to the placeholder itself.

After lifting, AOTAutograd traces the plain single-device model, with the placeholder as its
primal, and the partitioner saves the placeholder for backward: a free graph input.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import ops

_LOOKUPS = (F.embedding, torch.embedding, torch.ops.aten.embedding.default)
# They make an activation of one, and read parameters of any shape, or of one dimension.
_LAYERS = (
    *(F.linear, torch.addmm, torch.matmul, operator.matmul, F.conv1d, F.conv2d, F.conv3d),
    *(F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm),
)
_BY_ELEMENT = (operator.add, operator.mul, torch.add, torch.mul)


class Uses(NamedTuple):
    """Of an input of a lifted graph: their positions, and whether backward is to have it too."""

    positions: tuple[int, ...]
    needed_in_backward: bool


def lift_unshards(gm: fx.GraphModule) -> list[str]:
    """Replaces each ``zero3.unshard`` by its placeholder, in nested graphs too.

    One whose result leaves the top graph, itself or as a view, stays: a graph may not return
    the memory of a placeholder, which has none.

    Returns:
        The FQNs of the lifted parameters, in order of first use.
    """
    lifted: dict[str, None] = {}
    escaping = _storages_of_outputs(gm.graph)
    for graph in _graphs(gm):
        for node in graph.find_nodes(op="call_function", target=ops.unshard.default):
            if _storage(node) in escaping:
                continue
            placeholder, fqn, *_ = node.args
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)
            lifted[fqn] = None
        graph.lint()
    _recompile(gm)
    return list(lifted)


def set_contracts(gm: fx.GraphModule, contracts: Mapping[str, str]) -> None:
    """Has each ``zero3.unshard`` of a graph hold to another contract, given by FQN."""
    for graph in _graphs(gm):
        for node in graph.find_nodes(op="call_function", target=ops.unshard.default):
            placeholder, fqn, *_ = node.args
            node.args = (placeholder, fqn, contracts[fqn])
    _recompile(gm)


def uses_of(graph: fx.Graph) -> dict[fx.Node, Uses]:
    """How a lifted graph uses each of its inputs.

    That follows from the model as written: the same on ranks whose batches are of other sizes.
    """
    positions = {node: position for position, node in enumerate(graph.nodes)}
    # A budget for activations is met without regard to what is to be saved.
    has_budget = torch_internals.activation_memory_budget() < 1
    activations = set() if has_budget else _activations(graph)
    uses = {}
    for node in graph.find_nodes(op="placeholder"):
        users = [user for user in node.users if user.op != "output"]
        uses[node] = Uses(
            tuple(sorted(positions[user] for user in users)) or (len(positions),),
            not users or any(_is_needed(node, user, activations) for user in users),
        )
    return uses


def _activations(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that are computed from inputs that are no tensors of a module."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            is_activation = not torch_internals.is_of_a_module(node)
        else:
            is_activation = not found.isdisjoint(node.all_input_nodes)
        if is_activation and _tensors_of(node):
            found.add(node)
    return found


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("example_value")
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _is_needed(parameter: fx.Node, user: fx.Node, activations: set[fx.Node]) -> bool:
    """Whether a backward may read a parameter because of a use of it."""
    if user.target in _LOOKUPS:
        return False  # neither the gradient of the table nor that of positions reads it
    (value,) = _tensors_of(parameter)
    layers = (*_LAYERS, *_BY_ELEMENT) if value.dim() == 1 else _LAYERS
    results = _tensors_of(user)
    return (
        user.target not in layers
        or activations.isdisjoint(user.all_input_nodes)
        or not results
        or any(torch_internals.may_require_grad(result) for result in results)
    )


def declare_grad_dtypes(gm: fx.GraphModule, inputs: Mapping[int, ParameterFacts]) -> None:
    """Declares the leaf's dtype on each input (by position) that has a contract of its own."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for position, facts in inputs.items():
        if facts.declares_grad_dtype:
            with gm.graph.inserting_after(placeholders[-1]):
                gm.graph.call_function(
                    grad_dtype.declare, (placeholders[position], facts.grad_dtype)
                )
    gm.graph.lint()
    gm.recompile()


def _recompile(gm: fx.GraphModule) -> None:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()


def _graphs(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module.graph


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return torch_internals.storage_address(value) if isinstance(value, torch.Tensor) else None


def _storages_of_outputs(graph: fx.Graph) -> set[int | None]:
    return {_storage(node) for node in graph.output_node().all_input_nodes} - {None}
