"""Describes the sharded parameters among a graph's inputs to the passes."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from deepcompile_zero3.features.extensions.extension import Payload, parameter_behind
from deepcompile_zero3.features.offload.activations import Offload
from deepcompile_zero3.features.quantized.gathers import gather_format
from deepcompile_zero3.features.regions.regions import RegionFacts, outline_regions
from deepcompile_zero3.graph.recording import is_recording_graphs
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.lift import uses_of
from deepcompile_zero3.passes.pipeline import Pipeline
from deepcompile_zero3.passes.spare import find_spared
from deepcompile_zero3.sharding.memory import LOADED_AHEAD
from deepcompile_zero3.sharding.module import Zero3Module
from deepcompile_zero3.sharding.parameter import ShardedParameter, parameter_of
from deepcompile_zero3.torch_internals import compiler


def sharded_inputs(example_inputs: Sequence[Any]) -> dict[int, ShardedParameter]:
    """Returns the graph inputs that are placeholders, keyed by position."""
    result = {}
    for position, value in enumerate(example_inputs):
        parameter = parameter_of(value)
        if parameter is not None:
            result[position] = parameter
    return result


def scheduled(options: Options, parameters: Iterable[ShardedParameter]) -> Options:
    """Returns ``options`` with the schedule that was chosen for ``parameters``, if any."""
    schedule = next(
        filter(None, (each.schedule for each in map(parameter_behind, parameters))), None
    )
    return options if schedule is None else options.with_schedule(schedule)


def check_devices(parameters: Iterable[ShardedParameter], options: Options) -> None:
    """Checks that the graph of ``parameters`` can run with ``options``.

    Raises:
        ValueError: ``activations_mb`` is given, and a parameter is on a CPU, or a
            :class:`MeasuredSchedule` measures steps or has chosen a schedule.
    """
    if options.activations_mb == math.inf:
        return
    for each in map(parameter_behind, parameters):
        if is_recording_graphs() or each.schedule is not None:
            raise ValueError(
                f"option 'activations_mb' is {options.activations_mb!r}, but MeasuredSchedule "
                "takes no account of copies to host memory: use one of the two"
            )
        if each.placeholder.device.type == "cpu":
            raise ValueError(
                f"option 'activations_mb' is {options.activations_mb!r}, but '{each.fqn}' is on a "
                "CPU: the option moves activations from a GPU to host memory. On CPUs, "
                "offload_policy=FileOffloadPolicy(...) moves them to a file"
            )


def facts_of(
    parameters: Mapping[int, ShardedParameter], lifted: fx.GraphModule, options: Options
) -> dict[int, ParameterFacts]:
    """Returns facts of the ``parameters`` of Dynamo's graph, keyed by position."""
    groups: dict[str, int] = {}  # numbered by appearance: graphs hold nothing run-specific
    inputs = lifted.graph.find_nodes(op="placeholder")
    uses = uses_of(lifted.graph)
    spared = find_spared(lifted, [inputs[position] for position in parameters], _is_block)
    return {
        position: ParameterFacts(
            fqn=parameter.fqn,
            process_group=groups.setdefault(parameter.shard_group_name, len(groups)),
            gathers_views=parameter.handle.can.gathers_views,
            publishes=parameter.handle.can.publishes,
            sends_any_dtype=parameter.handle.can.sends_any_dtype,
            uses=uses[inputs[position]][0],
            only_embeds=uses[inputs[position]][1],
            is_spared=inputs[position] in spared,
            ndim=parameter.placeholder.dim(),
            nbytes=parameter.nbytes,
            reshard_after_forward=parameter.reshard_after_forward,
            is_trained=parameter.placeholder.requires_grad,
            leaf_dtype=parameter.settings.gradient_dtypes.leaf,
            wire_dtype=parameter.settings.gradient_dtypes.wire,
            # By itself, a compiler casts a gradient to the dtype of what it differentiates.
            declares_grad_dtype=parameter.placeholder.requires_grad
            and (
                parameter.settings.gradient_dtypes.leaf != parameter.compute_dtype
                or parameter.extension is not None  # may read as another dtype
            ),
            is_read_as_gathered=parameter.is_read_as_gathered and parameter.extension is None,
            is_gathered=parameter.extension is None,
            is_payload=isinstance(parameter, Payload),
        ).gathered_as(gather_format(parameter, options))
        for position, parameter in parameters.items()
    }


def regions_of(
    lifted: fx.GraphModule, facts: Mapping[int, ParameterFacts], options: Options
) -> dict[str, RegionFacts]:
    """Outlines equal blocks of Dynamo's graph, and returns facts of each, by name."""
    inputs = lifted.graph.find_nodes(op="placeholder")
    parameters = {inputs[position]: each for position, each in facts.items()}
    outlines = options.inductor if options.regions is None else options.regions
    outlines &= not options.fp32_weight_grads  # it looks at what computes a gradient
    outlines &= not (options.inductor and compiler.makes_cpp_wrapper(options.inductor_config))
    outlines &= not compiler.has_memory_budget(lifted)  # torch cannot tell what a call costs
    return outline_regions(lifted, parameters, lambda cls: outlines and _is_block(cls))


def _is_block(cls: type) -> bool:
    """Returns whether ``fully_shard`` was called on the modules of a class."""
    return issubclass(cls, Zero3Module)


def pipeline_of(
    parameters: Collection[ShardedParameter],
    inputs: Mapping[int, ParameterFacts],
    options: Options,
    metadata: Iterable[int] = (),
) -> Pipeline:
    """Returns the passes over a graph, whose ``inputs`` are known by position."""
    offload = _offload(parameters, options)
    return Pipeline(inputs, options, _keep_bytes(parameters, options), metadata, offload)


def _keep_bytes(parameters: Collection[ShardedParameter], options: Options) -> float:
    """Returns a graph's share of ``keep_mb``: its parameters' share of the models' bytes."""
    return options.keep_mb * 2**20 * share if (share := _share(parameters)) else 0.0


def _offload(parameters: Collection[ShardedParameter], options: Options) -> Offload | None:
    """Returns where a graph's saved tensors go, if the models have a budget of memory."""
    distinct = list(map(parameter_behind, parameters))
    if options.activations_mb < math.inf and distinct:
        max_bytes = options.activations_mb * 2**20 * _share(parameters)
        return Offload(max_bytes, LOADED_AHEAD, None, distinct[0].placeholder.device.type)
    memory = next((each.memory for each in distinct if each.memory), None)
    if memory is None:
        return None
    max_bytes = int(memory.activation_bytes * _share(parameters))
    return Offload(max_bytes, memory.loaded_ahead, memory.tier.number)


def _share(parameters: Collection[ShardedParameter]) -> float:
    """Returns the share of the models' bytes that ``parameters`` have."""
    models = {parameter.model for parameter in parameters} - {None}
    whole = sum(model.nbytes for model in models if model is not None)
    mine = sum(parameter.nbytes for parameter in set(map(parameter_behind, parameters)))
    return mine / whole if mine else 0.0
