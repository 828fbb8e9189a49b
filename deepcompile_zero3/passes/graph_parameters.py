"""Reads what AOTAutograd says of a partitioned graph's inputs and results."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.metadata import NUM_SAVED, PARAMETER
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.torch_internals import compiler


def find_parameters(
    gm: fx.GraphModule, inputs: Mapping[int, ParameterFacts]
) -> tuple[dict[fx.Node, ParameterFacts], dict[int, ParameterFacts]]:
    """Returns the inputs that are parameters, and the outputs that are their gradients.

    Records the facts of each parameter in the meta of its input.

    Raises:
        NotImplementedError: the gradient of a parameter is a tensor subclass.
    """
    nodes = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if (facts := _facts_of(node.meta.get("desc"), inputs)) is not None:
            nodes[node] = node.meta[PARAMETER] = facts
    gradients = {}
    for position, description in enumerate(gm.graph.output_node().meta.get("desc", ())):
        whole = compiler.whole_of(description)
        is_gradient = isinstance(whole, compiler.GradAOTOutput)
        facts = _facts_of(whole.grad_of, inputs) if is_gradient else None
        if facts is None:
            continue
        if whole is not description:  # autograd would give the gradient to the placeholder
            raise NotImplementedError(
                f"the gradient of '{facts.fqn}' is a tensor subclass in compiled code: pass plain "
                "tensors to the compiled module, or run the module in eager code"
            )
        gradients[position] = facts
    return nodes, gradients


def saved_outputs(graph: fx.Graph) -> set[fx.Node]:
    """Returns the outputs of a forward that are saved for backward."""
    output = graph.output_node()
    results: Any = output.args[0]
    return {results[position] for position in saved_positions(output)}


def saved_names(graph: fx.Graph) -> dict[int, str]:
    """Returns the names of the saved outputs by position. The backward's inputs have the same."""
    output = graph.output_node()
    results: Any = output.args[0]
    saved = sorted(saved_positions(output))
    return {i: results[i].name for i in saved if isinstance(results[i], fx.Node)}


def saved_positions(output: fx.Node) -> set[int]:
    """Returns the positions of a forward's outputs that are saved for backward."""
    results: Any = output.args[0]
    if NUM_SAVED in output.meta:
        return set(range(len(results) - output.meta[NUM_SAVED], len(results)))
    return {  # another partitioner may have made a graph without parameters
        position
        for position, description in enumerate(output.meta.get("desc", ()))
        if isinstance(description, compiler.SAVED_OUTPUTS)
    }


def refuse_writes(gm: fx.GraphModule, inputs: Mapping[int, ParameterFacts]) -> None:
    """Raises Zero3Error if a graph writes to a parameter.

    AOTAutograd writes a mutated input back in the graph or after it.
    """
    written = [
        node.args[0].meta.get("desc")
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if isinstance(node.args[0], fx.Node)
    ]
    for description in gm.graph.output_node().meta.get("desc", ()):
        if isinstance(description, compiler.InputMutationAOTOutput):
            written.append(description.mutated_input)
    for description in written:
        facts = _facts_of(description, inputs)
        if facts is not None:
            raise Zero3Error(
                f"'{facts.fqn}' is modified in place in compiled code, where it is a gathered "
                "copy that is freed: modify the parameter outside of forward, while it is sharded"
            )


def _facts_of(description: Any, inputs: Mapping[int, ParameterFacts]) -> ParameterFacts | None:
    if isinstance(description, compiler.PlainAOTInput):
        return inputs.get(description.idx)
    return None
