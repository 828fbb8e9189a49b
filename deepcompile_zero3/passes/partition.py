"""The joint graph, before it is partitioned: what backward will gather is settled here.

A partitioner weighs the bytes of activations against each other, and ops are decomposed by their
shapes, so that a batch of another size may save, and compute again, something else; and each rank
sees batches of its own. Yet all ranks must gather the same parameters. So, of those that backward
gathers again, it gets all, whatever it does with them, as in FSDP2. The exception are parameters
that only look rows up, whose gradients need no weight: what they give is saved.

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
    embedding = {node for node in again if parameters[node].only_embeds}
    gradients = _descendants(tangents)
    alone = set(again)  # functions of parameters alone
    neutral: set[fx.Node] = set()  # constants and reductions: such a function may read them too
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output") or node in gradients:
            continue
        inputs = set(node.all_input_nodes)
        is_plain = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        settled = all(n in alone or n in neutral or _is_size(n) for n in inputs)
        settled &= node.target is not torch.ops.aten.embedding.default  # of rows by position, too
        if not is_plain or _is_random(node) or not settled:
            if inputs & embedding:
                _tag(node, CheckpointPolicy.MUST_SAVE)
        elif inputs & alone and not _is_reduction(node):
            alone.add(node)
            _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
        else:
            neutral.add(node)
    _need([node for node in parameters if node in again - embedding], gm.graph, gradients)
    gm.recompile()


def needed_in_backward(gradient: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stands in a graph from here to :func:`drop_needs`, so that backward gets ``parameters``."""
    return gradient


def drop_needs(gm: fx.GraphModule) -> None:
    """Removes ``needed_in_backward`` from a backward graph, whose inputs stay."""
    for node in gm.graph.find_nodes(op="call_function", target=needed_in_backward):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def _need(parameters: list[fx.Node], graph: fx.Graph, gradients: set[fx.Node]) -> None:
    output = graph.output_node()
    gradient = next((n for n in output.all_input_nodes if n in gradients), None)
    if not parameters or gradient is None:
        return
    with graph.inserting_before(output):
        needs = graph.call_function(needed_in_backward, (gradient, parameters))
    needs.meta.update(gradient.meta)
    output.replace_input_with(gradient, needs)


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


def _is_reduction(node: fx.Node) -> bool:
    if node.target is operator.getitem or getattr(node.target, "is_view", False):
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
