"""Saves copies for backward of inputs that the forward writes to.

::

    copy_(count, count + 1)          backward computes with the saved ``count`` as it was before,
    return y * (count + 1), count    but the forward returns it after the write

A partitioner may save such an input, and compute functions of it again. Autograd does not count
writes in a graph, so backward would read the new values, and nothing would tell.
"""

import torch
from torch import fx

from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.torch_internals import compiler

_COPY = torch.ops.aten.copy_.default


def save_mutated_inputs_as_read(
    forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int
) -> None:
    """Makes a forward graph save copies of inputs that it, or the code around it, writes to.

    Args:
        forward: the forward graph.
        backward: its backward graph, whose inputs get the names of the copies.
        num_outputs: number of the forward's outputs that are not saved for backward.
    """
    mutated = _mutated(forward)
    if not mutated:
        return
    output = forward.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    received = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    first_node = next(n for n in forward.graph.nodes if n.op != "placeholder")
    for position in range(num_outputs, len(results)):
        saved = results[position]
        if not isinstance(saved, fx.Node) or base_of(saved) not in mutated:
            continue
        # Ahead of the write, which is the last of the graph or comes after it.
        place = first_node if saved.op == "placeholder" else saved.next
        with forward.graph.inserting_before(place):
            copy = forward.graph.call_function(torch.ops.aten.clone.default, (saved,))
        copy.meta["val"] = torch.ops.aten.clone.default(saved.meta["val"])
        results[position] = copy
        if saved.name in received:
            compiler.rename(received[saved.name], copy.name)
    output.args = (tuple(results), *output.args[1:])
    forward.recompile()
    backward.recompile()


def _mutated(forward: fx.GraphModule) -> set[fx.Node]:
    """Returns the inputs of a forward graph that are written to, in the graph or after it."""
    inputs = forward.graph.find_nodes(op="placeholder")
    written = {node.args[0] for node in forward.graph.find_nodes(op="call_function", target=_COPY)}
    after = {
        description.mutated_input
        for description in forward.graph.output_node().meta.get("desc", ())
        if isinstance(description, compiler.InputMutationAOTOutput)
    }
    return {node for node in inputs if node in written or node.meta.get("desc") in after}
