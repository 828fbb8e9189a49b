"""The backward graph: every raw gradient of a parameter goes into ``reduce_grad``."""

from collections.abc import Mapping
from typing import Any

from torch import fx

from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.runtime import ops


def insert_reduces(gm: fx.GraphModule, gradients: Mapping[int, ParameterFacts]) -> None:
    """Sends each gradient (by position in the graph's output) away as soon as it exists.

    Autograd gets None in its stead: the runtime sets the shard's ``.grad`` when the backward ends.
    """
    graph = gm.graph
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    inputs = graph.find_nodes(op="placeholder")
    for position, facts in gradients.items():
        grad = results[position]
        if grad is None:
            continue
        with graph.inserting_after(inputs[-1] if grad.op == "placeholder" else grad):
            reduce = graph.create_node(
                "call_function", ops.reduce_grad.default, (grad, facts.fqn), name="reduce_grad"
            )
        reduce.meta["val"] = grad.meta["val"].new_empty(0)
        results[position] = None
    output.args = (tuple(results),)
    graph.lint()
    gm.recompile()
