"""Keeps weight gradients in the precision they are computed in, on request.

A matmul of bf16 operands sums in fp32 and rounds the sum. If the result is a gradient that the leaf
keeps in fp32, the rounding is in vain. Eager PyTorch rounds too: this pass goes beyond the
contract.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.graph_pass import GraphFacts, GraphPass, own_pass
from deepcompile_zero3.passes.reduce import is_cast_to
from deepcompile_zero3.passes.region_results import move_products_out

aten, prims = torch.ops.aten, torch.ops.prims
_WITH_OUT_DTYPE: dict[Any, Any] = {
    aten.mm.default: aten.mm.dtype,
    aten.bmm.default: aten.bmm.dtype,
}


def widen_weight_gradients(gm: fx.GraphModule, gradients: Mapping[int, ParameterFacts]) -> None:
    """Makes matmuls return fp32 if they compute nothing but a gradient.

    The leaf's contract must be fp32 or None. ``gradients`` are keyed by position in the graph's
    output. On CUDA the kernel returns its accumulator. Elsewhere the operands are cast, which takes
    longer.
    """
    results: Any = gm.graph.output_node().args[0]
    for position, facts in gradients.items():
        node = results[position]
        if facts.leaf_dtype not in (torch.float32, None) or results.count(node) != 1:
            continue
        passed = []
        while isinstance(node, fx.Node) and len(node.users) == 1 and _keeps_values(node):
            passed.append(node)
            node = node.args[0]
        if not isinstance(node, fx.Node) or len(node.users) != 1 or not _is_low_matmul(node):
            continue
        _widen(node)
        for node in reversed(passed):
            if is_cast_to(node, torch.float32):
                node.replace_all_uses_with(node.all_input_nodes[0])
                gm.graph.erase_node(node)
            else:
                target: Any = node.target
                arguments: Any = fx.map_arg(node.args, lambda source: source.meta["val"])
                node.meta["val"] = target(*arguments, **node.kwargs)


def passes(parameters: Sequence[Any], share: float, options: Options) -> list[GraphPass]:
    """Returns the pass over the graphs of ``parameters``."""

    def run(gm: fx.GraphModule, facts: GraphFacts) -> None:
        if options.fp32_weight_grads:
            widen_weight_gradients(gm, facts.gradients)

    return [
        own_pass(
            widen_weight_gradients,
            run,
            graphs=("backward",),
            after=move_products_out,
            changes=("gradients",),
            uuid=options.fp32_weight_grads,
        )
    ]


def _is_low_matmul(node: fx.Node) -> bool:
    low = (torch.bfloat16, torch.float16)
    return node.target in _WITH_OUT_DTYPE and node.meta["val"].dtype in low


def _keeps_values(node: fx.Node) -> bool:
    """Returns whether ``node`` is its first input in another shape or in fp32."""
    if is_cast_to(node, torch.float32):
        return True
    is_view = getattr(node.target, "is_view", False) and node.target is not aten.view.dtype
    return is_view and isinstance(node.meta["val"], torch.Tensor)


def _widen(node: fx.Node) -> None:
    graph = node.graph
    target: Any = node.target
    arguments: Any = node.args
    with graph.inserting_before(node):
        if node.meta["val"].device.type == "cuda":
            target = _WITH_OUT_DTYPE[target]
            arguments = (*arguments, torch.float32)
        else:
            arguments = tuple(map(_in_fp32, arguments))
        wide = graph.create_node(
            "call_function", target, arguments, node.kwargs, name=f"{node.name}_fp32"
        )
    wide.meta["val"] = node.meta["val"].float()
    node.replace_all_uses_with(wide)
    graph.erase_node(node)


def _in_fp32(node: fx.Node) -> fx.Node:
    cast = prims.convert_element_type.default
    wide = node.graph.create_node(
        "call_function", cast, (node, torch.float32), name=f"{node.name}_fp32"
    )
    wide.meta["val"] = node.meta["val"].float()
    return wide
