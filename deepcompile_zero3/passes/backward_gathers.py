"""Decides in the joint graph, before it is partitioned, which parameters backward gathers.

All ranks must gather the same parameters. Their batches differ in size, however, so a partitioner
may save and recompute other values on each of them. This pass therefore gives backward every
parameter that it may gather again, used or not, as FSDP2 does. There are two exceptions. A
parameter that is only used to look up rows is left out: its gradient does not need the weight, and
the rows are saved. So is a spared parameter (see ``spare``): it has no gradient, and what combines
it with activations is saved. Functions of it alone are computed again where backward needs them.

Backward also gets the placeholder of each parameter that it computes a gradient for, which tells
the runtime whose gradient it reduces. A forward that may save the full tensor saves both.

A function of parameters alone, such as ``w.bfloat16()``, is recomputed: saving it would keep the
parameter. The partitioner decides about reductions, such as ``w.norm()``, whose results are small,
and about operators that are not torch's. Those may draw random numbers without saying so, and would
then return something else when they run again.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from deepcompile_zero3.graph.calls import bodies_of
from deepcompile_zero3.graph.metadata import PARAMETER
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.markers import needed_in_backward, saved_for_backward, with_saved
from deepcompile_zero3.torch_internals import OpOverload, tree_flatten, tree_unflatten

# A result this many times smaller than the largest parameter that it is made of is cheap to save.
_SMALL_RESULT_RATIO = 4
_SMALL_PARAMETER = 1024  # elements; what is made of smaller ones is measured by this
# Keys in a node's meta that a partitioner obeys.
_POLICY = ("recompute", "ac_graph_id")
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
# Higher-order operators that run graphs under a condition or in a loop.
_CALLS = ("cond", "map_impl", "scan")
# Namespaces of operators whose tags tell whether they draw random numbers.
_TAGGED_NAMESPACES = ("aten", "prims", "zero3")


def decide_backward_gathers(
    gm: fx.GraphModule,
    parameters: Mapping[fx.Node, ParameterFacts],
    tangents: Sequence[fx.Node],
    num_outputs: int,
    metadata: Sequence[fx.Node] = (),
) -> None:
    """Tags the nodes of a joint graph as saved or recomputed, and adds inputs of backward.

    Args:
        gm: the joint graph.
        parameters: the graph's inputs that are parameters.
        tangents: the graph's inputs that are gradients of outputs.
        num_outputs: number of the forward's outputs, which come first in the graph.
        metadata: other inputs that functions of parameters alone may read. Such functions may also
            read parameters that stay gathered.
    """
    regathered = {node: f for node, f in parameters.items() if f.reshard_after_forward is not False}
    held = [node for node in parameters if node not in regathered]
    gradients, spared = recompute_functions_of_parameters(
        gm, regathered, tangents, [*metadata, *held]
    )
    saved = _save_for_backward(
        gm.graph,
        [node for node, f in parameters.items() if f.is_trained and f.may_be_kept],
        _only_for_backward(gm.graph, spared, num_outputs),
        num_outputs,
    )
    gathered = [
        node
        for node, f in regathered.items()
        if f.is_gathered and not (f.only_embeds or f.is_spared)
    ]
    placeholders = [saved.get(node, node) for node, f in parameters.items() if f.is_trained]
    _add_inputs_of_backward(gm.graph, gathered, placeholders, tangents, gradients, num_outputs)
    gm.recompile()


def recompute_functions_of_parameters(
    gm: fx.GraphModule,
    parameters: Mapping[fx.Node, ParameterFacts],
    tangents: Sequence[fx.Node],
    metadata_inputs: Sequence[fx.Node] = (),
) -> tuple[set[fx.Node], list[fx.Node]]:
    """Tags nodes of a joint graph so that no function of ``parameters`` alone is saved.

    Rows that are looked up in parameters without other uses are saved. Results computed from spared
    parameters and activations are saved too, if backward needs them.

    Returns the nodes that depend on tangents, and the nodes that combine spared parameters with
    other values.
    """
    embedding = {node for node, facts in parameters.items() if facts.only_embeds}
    spared = {node for node, facts in parameters.items() if facts.is_spared}
    of_spared: list[fx.Node] = []
    gradients = _reached(tangents, lambda node: node.users)
    alone = set(parameters)  # functions of parameters alone
    others = set(metadata_inputs)  # constants and reductions too, which such functions may read
    others.update(gm.graph.find_nodes(op="get_attr"))
    # Elements of the largest parameter that each function is made of, also by reductions.
    sizes = {node: _numel(node.meta["val"]) for node in parameters}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in gradients:
            continue
        inputs = set(node.all_input_nodes)
        is_plain = _is_plain(node) or _is_plain_call(gm, node)
        is_known = all(n in alone or n in others or _is_size(n) for n in inputs)
        is_known &= node.target is not torch.ops.aten.embedding.default  # even at constant places
        is_function = is_plain and is_known and not _is_random(node)
        of = [sizes[each] for each in inputs if each in sizes]
        if is_function and of:
            sizes[node] = max(of)
        if is_function and of and _is_large(node, max(of), bool(inputs & alone)):
            alone.add(node)
            _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
            if inputs & spared:
                spared.add(node)
        elif inputs & spared:
            of_spared.append(node)
        elif not is_function and inputs & embedding:
            _tag(node, CheckpointPolicy.MUST_SAVE)
        if is_function and node not in alone:
            others.add(node)
            # What reads spared parameters leaves its checkpoint below.
            if node.meta.get("recompute") in _RECOMPUTED and not inputs & spared:
                _leave_checkpoint(node)
    _tag_saved(gm.graph, of_spared)
    return gradients, of_spared


def _save_for_backward(
    graph: fx.Graph, placeholders: list[fx.Node], results: list[fx.Node], num_outputs: int
) -> dict[fx.Node, fx.Node]:
    """Makes forward save ``placeholders``, and compute and save ``results``.

    Returns the node that stands for each placeholder in backward.
    """
    outputs = _outputs(graph)[:num_outputs]
    nodes = ((i, each) for i, each in enumerate(outputs) if isinstance(each, fx.Node))
    position = next((i for i, each in nodes if not _orders(each)), None)
    # Without an output there is no gradient.
    if position is None or not (placeholders or results):
        return {}
    output = outputs[position]
    # Inserted as early as the output: a partitioner sorts nodes ahead of the last output.
    inputs = graph.find_nodes(op="placeholder")
    place = max([inputs[-1] if output.op == "placeholder" else output, *results])
    with graph.inserting_after(place):
        marker = graph.call_function(with_saved, (output, []))
    result = {}
    with graph.inserting_before(marker):
        for placeholder in placeholders:
            node = result[placeholder] = graph.call_function(saved_for_backward, (placeholder,))
            node.meta = {k: v for k, v in output.meta.items() if k not in _POLICY}
            node.meta.update({key: placeholder.meta[key] for key in ("val", PARAMETER)})
            _tag(node, CheckpointPolicy.MUST_SAVE)
    saved = list(result.values())
    for each in results:
        with graph.inserting_after(each):
            node = graph.call_function(saved_for_backward, (each,))
        each.replace_all_uses_with(node, lambda user: user.target is not saved_for_backward)
        node.meta = {k: v for k, v in each.meta.items() if k not in _POLICY}
        _tag(node, CheckpointPolicy.MUST_SAVE)
        saved.append(node)
    marker.args = (output, saved)
    marker.meta = dict(output.meta)
    _set_output(graph, position, marker)
    return result


def _orders(output: fx.Node) -> bool:
    """Returns whether ``output`` is a token that orders effects, which torch removes later."""
    source: Any = output.args[0] if output.target is operator.getitem else None
    return source is not None and getattr(source.target, "__name__", "") == "with_effects"


def _only_for_backward(
    graph: fx.Graph, nodes: Iterable[fx.Node], num_outputs: int
) -> list[fx.Node]:
    """Returns the tensors that ``nodes`` compute and no output of the forward needs.

    Only the backward of a custom autograd function reads such a tensor. A partitioner would not let
    forward compute it.
    """
    outputs = [each for each in _outputs(graph)[:num_outputs] if isinstance(each, fx.Node)]
    needed = _reached(outputs, lambda node: node.all_input_nodes)
    tensors = (tensor for node in nodes for tensor in _tensors_of(node))
    return sorted(tensor for tensor in tensors if tensor.users and tensor not in needed)


def _add_inputs_of_backward(
    graph: fx.Graph,
    gathered: list[fx.Node],
    placeholders: list[fx.Node],
    tangents: Sequence[fx.Node],
    gradients: set[fx.Node],
    num_outputs: int,
) -> None:
    if not tangents or not (gathered or placeholders):
        return
    outputs = _outputs(graph)
    results = [i for i in range(num_outputs, len(outputs)) if isinstance(outputs[i], fx.Node)]
    if not results:
        return
    # The tangent among its arguments keeps the node out of forward.
    position = next((i for i in results if outputs[i] in gradients), results[0])
    gradient = outputs[position]
    with graph.inserting_before(graph.output_node()):
        needs = graph.call_function(
            needed_in_backward, (gradient, gathered, placeholders, tangents[:1])
        )
    needs.meta.update(gradient.meta)
    _set_output(graph, position, needs)


def _outputs(graph: fx.Graph) -> list[Any]:
    return tree_flatten(graph.output_node().args)[0]


def _set_output(graph: fx.Graph, position: int, node: fx.Node) -> None:
    """Makes the graph return ``node`` at ``position``.

    The replaced node may be returned at other positions too.
    """
    output = graph.output_node()
    leaves, structure = tree_flatten(output.args)
    leaves[position] = node
    output.args = tree_unflatten(leaves, structure)


def _tag_saved(graph: fx.Graph, of_spared: list[fx.Node]) -> None:
    """Tags nodes so that they are saved, not recomputed.

    A checkpoint around such a node computes no gradient, so it recomputes nothing either.
    """
    checkpoints = {node.meta["ac_graph_id"] for node in of_spared if "ac_graph_id" in node.meta}
    inside = [node for node in graph.nodes if node.meta.get("ac_graph_id") in checkpoints]
    tensors = [tensor for node in of_spared for tensor in _tensors_of(node)]
    for node in (*inside, *tensors):
        for key in _POLICY:
            node.meta.pop(key, None)
    for node in of_spared:
        _tag(node, CheckpointPolicy.MUST_SAVE)


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    """Returns ``node``, or the tensors in it if it is a tuple."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    items = (user for user in node.users if user.target is operator.getitem)
    return [tensor for item in items for tensor in _tensors_of(item)]


def _tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    of_user = node.meta.get("recompute")  # set by a checkpoint of the user
    if of_user is None or {of_user, policy} <= set(_RECOMPUTED):
        node.meta["recompute"] = policy
        _leave_checkpoint(node)


def _leave_checkpoint(node: fx.Node) -> None:
    """Puts ``node`` into the last of the regions that checkpoints recompute.

    They are numbered, and a partitioner saves what one passes to a later one. The last passes
    nothing on. Functions of parameters in the backward are there, and so is what they read.
    """
    node.meta["ac_graph_id"] = sys.maxsize


def _reached(
    roots: Iterable[fx.Node], neighbors: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    found = set(roots)
    pending = list(found)
    while pending:
        for node in neighbors(pending.pop()):
            if node not in found:
                found.add(node)
                pending.append(node)
    return found


def _is_plain(node: fx.Node) -> bool:
    op = node.target
    is_of_torch = isinstance(op, OpOverload) and op.namespace in _TAGGED_NAMESPACES
    return is_of_torch or op is operator.getitem


def _is_plain_call(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node runs graphs of torch's operators, under a condition or in a loop."""
    if getattr(node.target, "__name__", "") not in _CALLS:
        return False
    bodies = bodies_of(gm, node)
    calls = [(b, each) for b in bodies for each in b.graph.nodes if each.op == "call_function"]
    return bool(bodies) and all(
        (_is_plain(each) or _is_plain_call(body, each)) and not _is_random(each)
        for body, each in calls
    )


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_view(node: fx.Node) -> bool:
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def _is_large(node: fx.Node, size: int, reads_large: bool) -> bool:
    """Whether a function of parameters would take much memory if it were saved.

    Args:
        node: the function.
        size: elements of the largest parameter that it is made of.
        reads_large: whether it reads a parameter or another large function.
    """
    if _is_view(node):  # which would keep all of what it is a view of
        return reads_large
    result = _numel(node.meta["val"])
    read = sum(_numel(each.meta.get("val")) for each in node.all_input_nodes)
    is_reduction = _is_smaller(result, read) or not reads_large
    return not (is_reduction and _is_smaller(result, max(size, _SMALL_PARAMETER)))


def _is_smaller(result: Any, size: Any) -> bool:
    is_known = isinstance(result, int) and isinstance(size, int)
    return is_known and result * _SMALL_RESULT_RATIO < size


def _numel(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_numel(item) for item in value)
    return value.numel() if isinstance(value, torch.Tensor) else 0
