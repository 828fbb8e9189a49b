"""The backward graph: every raw gradient of a parameter goes into ``reduce_grad``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from deepcompile_zero3.grad_dtype import DTYPES
from deepcompile_zero3.graph_text import COMMENT, short_name
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import _C, ops

_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def insert_reduces(gm: fx.GraphModule, gradients: Mapping[int, ParameterFacts]) -> None:
    """Sends each gradient (by position in the graph's output) away when it and those before it in
    ``gradients`` exist: they may come in another order, reductions do not.

    Autograd gets None in its stead: the runtime sets the shard's ``.grad`` when the backward ends.
    """
    graph = gm.graph
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    order = {node: position for position, node in enumerate(graph.nodes)}
    place = graph.find_nodes(op="placeholder")[-1]  # what the latest reduction follows
    last = place
    for position, facts in gradients.items():
        grad = results[position]
        if grad is None:
            continue
        if is_cast_to(grad, facts.grad_dtype):
            # The runtime does that too, and where a compiler cannot fuse it with another cast.
            grad = grad.args[0]
        if order[grad] > order[place]:
            place = last = grad
        with graph.inserting_after(last):
            last = graph.create_node(
                "call_function",
                ops.reduce_grad.default,
                (grad, facts.fqn),
                {"contract": _C.contract_name(facts.grad_dtype)},
                name="reduce_grad",
            )
        last.meta["val"] = grad.meta["val"].new_empty(0)
        last.meta[COMMENT] = _dtypes(grad.meta["val"].dtype, facts)
        results[position] = None
    output.args = (tuple(results),)
    graph.lint()
    gm.recompile()


def is_cast_to(node: fx.Node, dtype: torch.dtype | None) -> bool:
    """Whether ``node`` casts what could be a gradient to ``dtype``, and does nothing else to it."""
    if node.target not in _CASTS:
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return source.dtype in DTYPES and value.dtype == dtype and value.device == source.device


def _dtypes(raw: torch.dtype, facts: ParameterFacts) -> str:
    """The way of a gradient: what the graph says that it is, the leaf's contract, the wire."""
    wire = facts.reduce_dtype or facts.grad_dtype or raw
    leaf = "any" if facts.grad_dtype is None else short_name(facts.grad_dtype)
    return f"{short_name(raw)} -> {leaf} -> {short_name(wire)}"
