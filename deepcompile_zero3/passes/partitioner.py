"""The partitioner of joint graphs: ours before torch's, or before another one of the user's."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx

from deepcompile_zero3.graph.calls import graph_modules
from deepcompile_zero3.graph.metadata import NUM_SAVED
from deepcompile_zero3.passes.backward_gathers import (
    decide_backward_gathers,
    recompute_functions_of_parameters,
)
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.graph_parameters import find_parameters
from deepcompile_zero3.passes.mutated_inputs import save_mutated_inputs_as_read
from deepcompile_zero3.passes.pipeline import Pipeline
from deepcompile_zero3.passes.region_facts import RegionFacts, region_of
from deepcompile_zero3.passes.region_results import separate_results
from deepcompile_zero3.torch_internals import compiler, stored_graphs

_Key = TypeVar("_Key")


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
        self._key = pipeline.key
        self._regions = regions
        self._partitioner = partitioner

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Returns the forward and the backward of a joint graph, as torch's partitioners do.

        Regions are partitioned first, and then the graph that calls them.
        """
        partition = self._partitioner or compiler.min_cut_rematerialization_partition
        # Another partitioner, or a memory budget, may recompute nodes that are marked as saved.
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
            forward, backward = partition(gm, joint_inputs, **kwargs)
            save_mutated_inputs_as_read(forward, backward, kwargs["num_fwd_outputs"])
            return forward, backward
        separate_results(gm)
        nodes, _ = find_parameters(gm, self._inputs)
        tangents = [
            node
            for node in inputs
            if isinstance(compiler.whole_of(node.meta.get("desc")), compiler.TangentAOTInput)
        ]
        metadata = [
            node
            for node in inputs
            if isinstance(node.meta.get("desc"), compiler.PlainAOTInput)
            and node.meta["desc"].idx in self._metadata
        ]
        nodes = nodes if saves else _gathered_again(nodes)
        num_outputs = kwargs["num_fwd_outputs"]
        decide_backward_gathers(gm, nodes, tangents, num_outputs, metadata)
        forward, backward = partition(gm, joint_inputs, **kwargs)
        save_mutated_inputs_as_read(forward, backward, num_outputs)
        output = forward.graph.output_node()
        output.meta[NUM_SAVED] = len(output.args[0]) - num_outputs  # torch removes the first ones
        if len(graph_modules(backward)) > 1:
            stored_graphs.keep_from_being_stored(backward)
        return forward, backward

    def uuid(self) -> Any:
        """Returns a key of everything besides the graph that shapes the result.

        Inductor and AOTAutograd make it a part of the keys of their caches.
        """
        other = self._partitioner.uuid() if self._partitioner else None
        return self._key, self._regions, other


def _gathered_again(facts: Mapping[_Key, ParameterFacts]) -> dict[_Key, ParameterFacts]:
    """Returns ``facts`` without the exceptions, so that backward gathers all these parameters."""
    return {key: replace(each, only_embeds=False, is_spared=False) for key, each in facts.items()}
