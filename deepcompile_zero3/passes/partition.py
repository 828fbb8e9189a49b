"""The joint graph, before it is partitioned: what backward will gather is settled here.

A partitioner weighs the bytes of activations against each other, and ops are decomposed by their
shapes, so that a batch of another size may save, and compute again, something else; and each rank
sees batches of its own. Yet all ranks must gather the same parameters. So, of those that backward
gathers again, it gets all, whatever it does with them, as in FSDP2. The exception are parameters
that only look rows up, whose gradients need no weight, and those of a frozen part ahead of all that
is trained: what they give is saved, whatever its size.

A function of parameters alone, such as ``w.bfloat16()``, is computed again: saving it would keep
the parameter. Its reductions, such as ``w.norm()``, are as the partitioner likes.
"""

import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from deepcompile_zero3.passes.facts import ParameterFacts

_SAVE, _RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
_COPIES = (
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten.clone.default,
)
# A result so many times smaller than what it was computed from is a reduction, and cheap to save.
_REDUCTION = 4


def settle_backward_gathers(
    gm: fx.GraphModule, parameters: Mapping[fx.Node, ParameterFacts], tangents: Iterable[fx.Node]
) -> None:
    """Tags the nodes of a joint graph with what a partitioner may do.

    Args:
        parameters: the graph's inputs that are parameters.
        tangents: the graph's inputs that are gradients of outputs.
    """
    again = {node for node, facts in parameters.items() if facts.reshard_after_forward is not False}
    spared = {node for node in again if not parameters[node].needed_in_backward}
    gradients = _descendants(tangents)
    alone = again - spared  # functions of parameters alone
    needed = [node for node in parameters if node in alone]
    neutral: set[fx.Node] = set()  # constants and reductions: such a function may read them too
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or node in gradients:
            continue
        inputs = set(node.all_input_nodes)
        is_plain = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        settled = all(n in alone or n in neutral or _is_size(n) for n in inputs)
        if inputs & spared:
            if _is_copy(node):
                spared.add(node)
            _tag(node, _RECOMPUTE if node in spared else _SAVE)
        elif not is_plain or _is_random(node) or not settled:
            continue
        elif inputs & alone and not _is_reduction(node):
            alone.add(node)
            _tag(node, _RECOMPUTE)
        else:
            neutral.add(node)
    _hand(needed, gm.graph, gradients)
    gm.recompile()


def handed_to_backward(gradient: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stands in a graph from here to :func:`drop_handing`, so that backward gets ``parameters``."""
    return gradient


def drop_handing(gm: fx.GraphModule) -> None:
    """Removes ``handed_to_backward`` from a backward graph, whose inputs stay."""
    for node in gm.graph.find_nodes(op="call_function", target=handed_to_backward):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def _hand(parameters: list[fx.Node], graph: fx.Graph, gradients: set[fx.Node]) -> None:
    output = graph.output_node()
    gradient = next((n for n in output.all_input_nodes if n in gradients), None)
    if not parameters or gradient is None:
        return
    with graph.inserting_before(output):
        handing = graph.call_function(handed_to_backward, (gradient, parameters))
    handing.meta.update(gradient.meta)
    output.replace_input_with(gradient, handing)


def _tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    if "recompute" in node.meta:
        return  # a checkpoint of the user has said it
    node.meta["recompute"] = policy
    # Checkpointed regions are numbered, and what one hands to a later one is saved. This is in the
    # last one, and hands nothing on.
    node.meta["ac_graph_id"] = sys.maxsize


def _descendants(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    pending = list(found)
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found.add(user)
                pending.append(user)
    return found


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def _is_copy(node: fx.Node) -> bool:
    return _is_view(node) or node.target in _COPIES


def _is_reduction(node: fx.Node) -> bool:
    if _is_view(node):
        return False
    result, read = (
        _numel(node.meta["val"]),
        sum(_numel(n.meta["val"]) for n in node.all_input_nodes),
    )
    return isinstance(result, int) and isinstance(read, int) and result * _REDUCTION < read


def _numel(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_numel(item) for item in value)
    return value.numel() if isinstance(value, torch.Tensor) else 0
