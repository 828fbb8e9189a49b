"""Describes the sharded parameters among a graph's inputs to the passes."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from deepcompile_zero3.graph.recording import is_recording_graphs_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.graph_pass import Order, check_passes
from deepcompile_zero3.passes.lift import uses_of
from deepcompile_zero3.passes.pipeline import Pipeline, in_order
from deepcompile_zero3.passes.region_facts import RegionFacts, marked_regions
from deepcompile_zero3.passes.spare import find_spared
from deepcompile_zero3.plugins import graphs
from deepcompile_zero3.sharding.module import Zero3Module
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.source import (
    Source,
    is_metadata,
    parameters_behind,
    source_of,
)


def sharded_inputs(example_inputs: Sequence[Any]) -> dict[int, Source]:
    """Returns the sources whose placeholders are graph inputs, keyed by position."""
    sources = enumerate(map(source_of, example_inputs))
    return {position: source for position, source in sources if source is not None}


class Described(NamedTuple):
    """A graph of Dynamo's, as the passes know it.

    Attributes:
        pipeline: its passes.
        regions: facts of the regions in it, by name.
        checks: functions that check the sources of a run.
    """

    pipeline: Pipeline
    regions: Mapping[str, RegionFacts]
    checks: Sequence[Callable[[Sequence[Source]], None]]


def describe(
    gm: fx.GraphModule,
    sources: Mapping[int, Source],
    example_inputs: Sequence[Any],
    options: Options,
) -> Described:
    """Describes Dynamo's graph to the passes, and lets features rewrite it.

    Args:
        gm: the graph, after ``lift_unshards``.
        sources: see :func:`sharded_inputs`.
        example_inputs: example inputs of the graph.
        options: the backend's options.

    Raises:
        ValueError: ``activations_mb`` is given, and a parameter is on a CPU, or a
            :class:`MeasuredSchedule` measures steps or has chosen a schedule.
    """
    parameters = parameters_behind(sources.values())
    _check_devices(parameters, options)
    options = _scheduled(options, parameters)
    facts = facts_of_inputs(sources, gm, options)
    checks = _checks_of(sources.values(), facts.values(), options)
    regions = _regions_of(gm, facts, options)
    metadata = [i for i, value in enumerate(example_inputs) if is_metadata(value)]
    return Described(pipeline_of(parameters, facts, options, metadata), regions, checks)


def _scheduled(options: Options, parameters: Iterable[ShardedParameter]) -> Options:
    """Returns ``options`` with the schedule that was chosen for ``parameters``, if any."""
    schedule = next(filter(None, (each.leaf_facts.schedule for each in parameters)), None)
    return options if schedule is None else options.with_schedule(schedule)


def _check_devices(parameters: Iterable[ShardedParameter], options: Options) -> None:
    """Raises ValueError if the graph of ``parameters`` cannot run with ``options``."""
    if options.activations_mb == math.inf:
        return
    for each in parameters:
        if is_recording_graphs_of([each]) or each.schedule is not None:
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


def facts_of_inputs(
    sources: Mapping[int, Source], lifted: fx.GraphModule, options: Options
) -> dict[int, ParameterFacts]:
    """Returns facts of the ``sources`` among the inputs of Dynamo's graph, keyed by position."""
    groups: dict[str | int, int] = {}  # numbered by appearance: graphs hold nothing run-specific
    inputs = lifted.graph.find_nodes(op="placeholder")
    uses = uses_of(lifted.graph)
    spared = find_spared(lifted, [inputs[position] for position in sources], _is_block)
    return {
        position: ParameterFacts(
            **{
                **vars(source.parameter.leaf_facts),
                **vars(source.facts),
                "process_group": groups.setdefault(source.facts.process_group, len(groups)),
            },
            fqn=source.fqn,
            uses=uses[inputs[position]][0],
            only_embeds=uses[inputs[position]][1],
            is_spared=inputs[position] in spared,
        ).gathered_as(format_of_gather(source, options))
        for position, source in sources.items()
    }


def format_of_gather(source: Source, options: Options) -> str:
    """Returns the format in which ``source`` is gathered; empty if it travels as it is."""
    formats = (each.format_of_gather(source, options) for each in graphs.FORMATS)
    return next(filter(None, formats), "")


def _checks_of(
    sources: Collection[Source], facts: Collection[ParameterFacts], options: Options
) -> list[Callable[[Sequence[Source]], None]]:
    """Returns checks of the sources that a graph runs with, which was compiled for ``sources``."""
    formats = [each.gather_format for each in facts]
    checks = (each.check_of(sources, formats, options) for each in graphs.FORMATS)
    return [check for check in checks if check is not None]


def _regions_of(
    lifted: fx.GraphModule, facts: Mapping[int, ParameterFacts], options: Options
) -> dict[str, RegionFacts]:
    """Lets features rewrite Dynamo's graph, and returns facts of the regions in it, by name."""
    inputs = lifted.graph.find_nodes(op="placeholder")
    parameters = {inputs[position]: each for position, each in facts.items()}
    regions = marked_regions(lifted, parameters)
    for rewrite in graphs.CAPTURED:
        regions.update(rewrite(lifted, parameters, _is_block, options))
    return regions


def _is_block(cls: type) -> bool:
    """Returns whether ``fully_shard`` was called on the modules of a class."""
    return issubclass(cls, Zero3Module)


def pipeline_of(
    parameters: Sequence[ShardedParameter],
    inputs: Mapping[int, ParameterFacts],
    options: Options,
    metadata: Iterable[int] = (),
) -> Pipeline:
    """Returns the passes over a graph, whose ``inputs`` are known by position.

    The graph has its share of ``keep_mb``: its parameters' share of the models' bytes.
    """
    whole = sum(model.nbytes for model in {each.model for each in parameters} if model is not None)
    mine = sum(parameter.nbytes for parameter in parameters)
    share = mine / whole if mine else 0.0
    return Pipeline(inputs, options, share, metadata, passes_of(parameters, share, options))


def passes_of(
    parameters: Sequence[ShardedParameter] = (), share: float = 0.0, options: Options | None = None
) -> Order:
    """Returns the passes of the core and of features over the graphs of ``parameters``."""
    options = options or Options()
    made = (make(parameters, share, options) for make in graphs.PASSES)
    return in_order(each for passes in made for each in passes)


def parse_options(options: Mapping[str, Any] | None) -> Options:
    """Returns the options in ``options``, with passes that stand where they can.

    Raises:
        ValueError: as :meth:`Options.parse` and :func:`check_passes`.
        NotImplementedError: as :meth:`Options.parse`.
    """
    parsed = Options.parse(options)
    check_passes(parsed.passes, passes_of())
    return parsed
