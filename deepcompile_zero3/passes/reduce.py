"""Passes every raw gradient of a parameter in a backward graph to ``reduce_grad`` or its kin."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from deepcompile_zero3.grad_dtype import DTYPES
from deepcompile_zero3.graph.alias import untransposed
from deepcompile_zero3.graph.metadata import COMMENT, KEPT_OF
from deepcompile_zero3.graph.text import short_name
from deepcompile_zero3.passes.chain import reductions_in
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import _C, ops
from deepcompile_zero3.torch_internals import compiler

_LARGE = 64 << 10  # bytes from which on a gradient is computed in the memory that it is sent from
CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


@dataclass(frozen=True)
class ReductionComment:
    """Comment of a reduction in a graph's text: the dtypes of a gradient on its way.

    Attributes:
        raw: dtype of the gradient in the graph.
        leaf: dtype of the leaf's contract; None keeps whatever arrives.
        wire: dtype that it is reduced in.
        numel: number of elements of the full gradient.
    """

    raw: torch.dtype
    leaf: torch.dtype | None
    wire: torch.dtype
    numel: int

    def __str__(self) -> str:
        leaf = "any" if self.leaf is None else short_name(self.leaf)
        return f"{short_name(self.raw)} -> {leaf} -> {short_name(self.wire)}"


def insert_reduces(
    gm: fx.GraphModule,
    gradients: Mapping[int, ParameterFacts],
    placeholders: Mapping[str, fx.Node],
) -> None:
    """Inserts a reduction for each gradient in a backward graph.

    A gradient is reduced as soon as it and all before it in ``gradients`` exist. Gradients may come
    in another order, reductions may not. Autograd gets None in place of the gradient: the runtime
    sets the shard's ``.grad`` when the backward ends.

    An ``unshard`` that was not lifted has a reduction already, since AOTAutograd differentiated it.
    That reduction takes the placeholder in place of a kept full tensor.

    Args:
        gm: the backward graph.
        gradients: the parameters, by position of their gradients in the graph's output.
        placeholders: the graph's inputs by FQN, which tell the runtime whose gradient it gets.
    """
    graph = gm.graph
    for reduction in reductions_in(graph):
        parameter = cast(fx.Node, reduction.args[1])
        if KEPT_OF in parameter.meta:
            reduction.update_arg(1, placeholders[parameter.meta[KEPT_OF]])
    results: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    order = {node: position for position, node in enumerate(graph.nodes)}
    inputs = graph.find_nodes(op="placeholder")
    place = inputs[-1]  # the node that the latest reduction follows
    last = place
    sent = []
    for position, facts in gradients.items():
        grad = results[position]
        if grad is None:
            continue
        if is_cast_to(grad, facts.leaf_dtype):
            # The runtime casts a gradient while it copies it into a bucket.
            grad = grad.args[0]
        if order[grad] > order[place]:
            place = last = grad
        with graph.inserting_after(last):
            op, source = _reduction_of(grad, facts, results)
            last = graph.create_node(
                "call_function",
                op.default,
                (source, placeholders[facts.fqn]),
                {"contract": _C.contract_name(facts.leaf_dtype)},
                name=op.__name__,
            )
        last.meta["val"] = grad.meta["val"].new_empty(0)
        last.meta[COMMENT] = _comment_on(grad.meta["val"], facts)
        results[position] = None
        sent.append(grad)
    compiler.set_results(graph, results)
    for grad in sent:
        _erase_unread(grad)


def _erase_unread(node: fx.Node) -> None:
    """Erases ``node`` and its sources if nothing reads them: the runtime computes them."""
    if node.users or node.op != "call_function":
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unread(source)


def _reduction_of(grad: fx.Node, facts: ParameterFacts, results: list[Any]) -> tuple[Any, Any]:
    """Returns the op that reduces ``grad``, and the op's first argument.

    The runtime computes a large gradient in the memory from which it is sent, if nothing else reads
    it and it is sent in its own dtype.
    """
    dtype = grad.meta["val"].dtype
    leaf = facts.leaf_dtype or dtype
    wire = facts.wire_dtype or leaf
    is_read = len(grad.users) > 1 or results.count(grad) > 1
    if facts.sends_any_dtype and torch.promote_types(dtype, wire) == wire:
        wire = dtype
    if facts.nbytes >= _LARGE and dtype == leaf == wire and not is_read:
        product = untransposed(grad)
        if product.target is torch.ops.aten.mm.default:
            return ops.reduce_mm, list(product.args)
        if (rows := _embedding_rows(grad)) is not None:
            return ops.reduce_rows, rows
    return ops.reduce_grad, grad


def _embedding_rows(grad: fx.Node) -> list[fx.Node] | None:
    """Returns the indices and rows that an embedding's ``grad`` adds to zeros, or None."""
    if grad.target is not torch.ops.aten._unsafe_masked_index_put_accumulate.default:
        return None
    into, mask, indices, values = cast(Any, grad.args)
    full = torch.ops.aten.full.default
    zeros = isinstance(into, fx.Node) and into.target is full and into.args[1] == 0
    if not zeros or len(indices) != 1 or grad.meta["val"].dim() != 2:
        return None
    value = values.meta["val"]
    with grad.graph.inserting_before(grad):
        zero = grad.graph.call_function(
            full, ([], 0.0), {"dtype": value.dtype, "device": value.device}
        )
        zero.meta["val"] = value.new_empty(())
        masked = grad.graph.call_function(torch.ops.aten.where.self, (mask, values, zero))
        masked.meta["val"] = torch.empty_like(value)
    return [indices[0], masked]


def is_cast_to(node: fx.Node, dtype: torch.dtype | None) -> bool:
    """Returns whether ``node`` only casts a possible gradient to ``dtype``."""
    if node.target not in CASTS:
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return source.dtype in DTYPES and value.dtype == dtype and value.device == source.device


def _comment_on(grad: torch.Tensor, facts: ParameterFacts) -> ReductionComment:
    wire = facts.wire_dtype or facts.leaf_dtype or grad.dtype
    return ReductionComment(grad.dtype, facts.leaf_dtype, wire, grad.numel())
