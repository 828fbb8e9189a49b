"""Runs the passes in their order on a joint graph, a forward and a backward."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.capture import add_capture
from deepcompile_zero3.graph.log import forward_numbers, log_graph
from deepcompile_zero3.graph.metadata import KEPT_OF, PARAMETER
from deepcompile_zero3.passes.chain import chain_reductions
from deepcompile_zero3.passes.facts import (
    ParameterFacts,
    in_backward_order,
    in_forward_order,
    in_gradient_order,
)
from deepcompile_zero3.passes.gather import clone_returned_views, insert_gathers
from deepcompile_zero3.passes.keep import choose_kept
from deepcompile_zero3.passes.partition import (
    decide_backward_gathers,
    drop_needed_in_backward,
    drop_saved_markers,
    is_saved_for_backward,
    recompute_functions_of_parameters,
)
from deepcompile_zero3.passes.reduce import insert_reduces
from deepcompile_zero3.passes.regions import RegionFacts, region_of
from deepcompile_zero3.passes.results import (
    keep_strides_of_regions,
    move_products_out,
    separate_results,
)
from deepcompile_zero3.passes.widen import widen_weight_gradients
from deepcompile_zero3.torch_internals import compiler

_Key = TypeVar("_Key")


class Pipeline:
    """The passes that rewrite the forward and backward graphs of one of Dynamo's graphs.

    Args:
        inputs: facts of the parameters, keyed by position of the graph input.
        bucket_bytes: maximum size in bytes of the full tensors that one collective gathers.
        keep_bytes: maximum size in bytes of the full tensors that the forward may keep for backward
            by choice.
        fp32_weight_grads: the option of that name.
        metadata: positions of inputs that functions of parameters may read, beside parameters.
    """

    def __init__(
        self,
        inputs: Mapping[int, ParameterFacts],
        bucket_bytes: int,
        keep_bytes: float,
        fp32_weight_grads: bool = False,
        metadata: Iterable[int] = (),
    ) -> None:
        self.inputs = inputs
        self._bucket_bytes = bucket_bytes
        self._keep_bytes = keep_bytes
        self._fp32_weight_grads = fp32_weight_grads
        self.metadata = frozenset(metadata)
        fqns = [facts.fqn for facts in inputs.values()]
        common = os.path.commonprefix(fqns)  # noqa: RUF071 (by characters, then cut at a dot)
        self._prefix = common.rfind(".") + 1  # characters of the common module's FQN
        self._kept: dict[str, int] = {}
        self._number = 0

    @property
    def settings(self) -> tuple:
        """Inputs of the passes besides the graph."""
        numbers = self._bucket_bytes, self._keep_bytes, self._fp32_weight_grads
        return self.inputs, sorted(self.metadata), *numbers

    def __call__(self, graph_module: fx.GraphModule, is_backward: bool) -> None:
        """Rewrites a graph. Called for the forward first, then for its backward."""
        _refuse_writes(graph_module, self.inputs)
        if is_backward:
            self._rewrite_backward(graph_module)
        else:
            self._rewrite_forward(graph_module)
        keep_strides_of_regions(graph_module)
        chain_reductions(graph_module)
        if not is_backward:
            self._number = next(forward_numbers)
        add_capture(graph_module, is_backward, self._number)
        if self.inputs:
            direction, kept = ("backward", {}) if is_backward else ("forward", self._kept)
            log_graph(graph_module, direction, self._number, kept)

    def _rewrite_forward(self, graph_module: fx.GraphModule) -> None:
        nodes = _sorted(_find_parameters(graph_module, self.inputs)[0], in_forward_order)
        _name_placeholders(nodes, self._prefix)
        # Only these may be kept: the runtime knows a gradient by its parameter's placeholder.
        known = {n: f for n, f in nodes.items() if is_saved_for_backward(n) or not f.is_trained}
        known, gathered = _gathered(known), _gathered(nodes)
        keep = choose_kept(_sorted(known, in_backward_order), self._keep_bytes)
        self._kept.update({nodes[node].fqn: nodes[node].nbytes for node in keep})
        insert_gathers(graph_module, gathered, self._bucket_bytes, keep)
        drop_saved_markers(graph_module)
        clone_returned_views(graph_module, _saved_positions(graph_module.graph.output_node()))

    def _rewrite_backward(self, graph_module: fx.GraphModule) -> None:
        nodes, gradients = _find_parameters(graph_module, self.inputs)
        kept = {node: facts for node, facts in nodes.items() if facts.fqn in self._kept}
        for node, facts in kept.items():
            node.meta[KEPT_OF] = facts.fqn
            del node.meta[PARAMETER]
            del nodes[node]
        inputs = graph_module.graph.find_nodes(op="placeholder")
        saved = {node: node.meta[PARAMETER] for node in inputs if PARAMETER in node.meta}
        # A parameter that might have been kept and was not is in both.
        placeholder_of = {f.fqn: node for node, f in (*saved.items(), *nodes.items())}
        _name_placeholders(nodes | saved, self._prefix)
        _name_placeholders(kept, self._prefix, "_full")
        gathered = drop_needed_in_backward(graph_module)
        drop_saved_markers(graph_module)
        nodes = {n: facts for n, facts in nodes.items() if n in gathered or n.users}
        gradients = _sorted(gradients, in_gradient_order)
        move_products_out(graph_module, gradients)
        if self._fp32_weight_grads:
            widen_weight_gradients(graph_module, gradients)
        insert_reduces(graph_module, gradients, placeholder_of)
        nodes = _sorted(_gathered(nodes), in_backward_order)
        insert_gathers(graph_module, nodes, self._bucket_bytes)


class Partitioner(compiler.CustomPartitionerFn):  # type: ignore[misc]
    """Prepares a joint graph, then calls Inductor's partitioner or another one of the user's."""

    def __init__(
        self,
        pipeline: Pipeline,
        regions: Mapping[str, RegionFacts],
        partitioner: Any = None,
    ) -> None:
        # Not the pipeline itself, which changes: Inductor copies this object, and keys hold it.
        self._inputs = pipeline.inputs
        self._metadata = pipeline.metadata
        self._settings = pipeline.settings
        self._regions = regions
        self._partitioner = partitioner

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Returns the forward and the backward of a joint graph, as torch's partitioners do.

        Regions are partitioned first, and then the graph that calls them.
        """
        partition = self._partitioner or compiler.min_cut_rematerialization_partition
        # Another partitioner, or a memory budget, may compute again what is marked to be saved.
        saves = self._partitioner is None and not compiler.has_memory_budget(gm)
        inputs = gm.graph.find_nodes(op="placeholder")
        region = region_of(gm)
        if region is not None:
            facts = {inputs[i]: each for i, each in self._regions[region].items()}
            recompute_functions_of_parameters(
                gm,
                facts if saves else _gathered_again(facts),
                [node for node in inputs if node.name.startswith("tangents")],
            )
            return partition(gm, joint_inputs, **kwargs)
        separate_results(gm)
        nodes, _ = _find_parameters(gm, self._inputs)
        tangents = [
            node for node in inputs if isinstance(node.meta.get("desc"), compiler.TangentAOTInput)
        ]
        metadata = [
            node
            for node in inputs
            if isinstance(node.meta.get("desc"), compiler.PlainAOTInput)
            and node.meta["desc"].idx in self._metadata
        ]
        nodes = nodes if saves else _gathered_again(nodes)
        decide_backward_gathers(gm, nodes, tangents, kwargs["num_fwd_outputs"], metadata)
        return partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Returns a key of everything besides the graph that shapes the result.

        Inductor and AOTAutograd make it a part of the keys of their caches.
        """
        other = self._partitioner.uuid() if self._partitioner else None
        return source_key(), self._settings, self._regions, other


@functools.cache
def source_key() -> bytes:
    """Returns a key of this library's sources."""
    return compiler.get_hash_for_files(
        tuple(sorted(map(str, Path(__file__).parents[1].rglob("*.py"))))
    )


def _gathered_again(facts: Mapping[_Key, ParameterFacts]) -> dict[_Key, ParameterFacts]:
    """Returns ``facts`` of parameters that backward gathers in any case."""
    return {key: replace(each, only_embeds=False, is_spared=False) for key, each in facts.items()}


def _refuse_writes(gm: fx.GraphModule, inputs: Mapping[int, ParameterFacts]) -> None:
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
                f"'{facts.fqn}' is modified in place inside of a compiled forward, where it is a "
                "temporary copy that is freed: modify the parameter outside of forward"
            )


def _facts_of(description: Any, inputs: Mapping[int, ParameterFacts]) -> ParameterFacts | None:
    if isinstance(description, compiler.PlainAOTInput):
        return inputs.get(description.idx)
    return None


def saved_outputs(graph: fx.Graph) -> set[fx.Node]:
    """Returns the outputs of a forward that are saved for backward."""
    output = graph.output_node()
    results: Any = output.args[0]
    return {results[position] for position in _saved_positions(output)}


def _saved_positions(output: fx.Node) -> set[int]:
    """Returns the positions of a forward's outputs that are saved for backward."""
    return {
        position
        for position, description in enumerate(output.meta.get("desc", ()))
        if isinstance(description, compiler.SAVED_OUTPUTS)
    }


def _find_parameters(
    gm: fx.GraphModule, inputs: Mapping[int, ParameterFacts]
) -> tuple[dict[fx.Node, ParameterFacts], dict[int, ParameterFacts]]:
    """Returns the inputs that are parameters, and the outputs that are their gradients.

    Records the facts of each parameter in the meta of its input.
    """
    nodes = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        if (facts := _facts_of(node.meta.get("desc"), inputs)) is not None:
            nodes[node] = node.meta[PARAMETER] = facts
    gradients = {}
    for position, description in enumerate(gm.graph.output_node().meta.get("desc", ())):
        is_gradient = isinstance(description, compiler.GradAOTOutput)
        facts = _facts_of(description.grad_of, inputs) if is_gradient else None
        if facts is not None:
            gradients[position] = facts
    return nodes, gradients


def _name_placeholders(
    inputs: Mapping[fx.Node, ParameterFacts], prefix: int, suffix: str = ""
) -> None:
    """Renames a graph's inputs after their parameters, without the first ``prefix`` characters."""
    for node, facts in inputs.items():
        compiler.rename(node, facts.fqn[prefix:].replace(".", "_") + suffix)


def _gathered(nodes: Mapping[fx.Node, ParameterFacts]) -> dict[fx.Node, ParameterFacts]:
    return {node: facts for node, facts in nodes.items() if facts.is_gathered}


def _sorted(
    facts: Mapping[_Key, ParameterFacts], order: Callable[[ParameterFacts], int]
) -> dict[_Key, ParameterFacts]:
    return dict(sorted(facts.items(), key=lambda item: order(item[1])))
