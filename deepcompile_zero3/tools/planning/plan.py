"""``plan``: predicts a step of a large model on ranks that need not exist."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepcompile_zero3.graph_inputs import parse_options
from deepcompile_zero3.options import Options
from deepcompile_zero3.sharding.module_parameters import all_parameters_of
from deepcompile_zero3.tools.planning.graphs import ShardModel, Trace, fake_model, trace
from deepcompile_zero3.tools.planning.machine import Machine, machine_of
from deepcompile_zero3.tools.planning.predicted import Plan
from deepcompile_zero3.tools.planning.simulate import Assumptions, simulate
from deepcompile_zero3.tools.progress import Tell, say_nothing
from deepcompile_zero3.tools.report import line_of_break, report_of

_WORTH = 0.02  # fraction of a step


def plan(
    build: Callable[[], nn.Module],
    call: Mapping[str, Any],
    *,
    world_size: int,
    replicas: int = 1,
    machine: Machine | str = "h100",
    shard: ShardModel | None = None,
    options: Mapping[str, Any] | None = None,
    optimizer_bytes: int = 8,
    prefetch: bool = True,
    advise: bool = True,
    seconds_by_kernel: Mapping[str, float] | None = None,
    tell: Tell = say_nothing,
) -> Plan:
    """Predicts a step of ``build()`` on ``world_size`` ranks of a machine.

    The code that trains shards, traces and rewrites the model, and the runtime decides which
    parameters are gathered and reduced together. Nothing is computed or sent, and parameters take
    no memory. Memory, bytes and collectives follow from these decisions. Times come from a model of
    the machine: ``docs/planning.md`` describes the model and its errors. A data-dependent size
    counts as 0, and ``reshard_after_forward=N`` as True.

    Args:
        build: makes the model; called under ``torch.device("meta")``.
        call: keyword arguments of a forward on one rank, which returns a loss first or as
            ``.loss``; tensors on the CPU, whose values do not matter.
        world_size: the number of ranks of all replicas.
        replicas: the number of replicas of the model (hybrid sharding).
        machine: a name in :data:`MACHINES`, or a :class:`Machine`.
        shard: shards the model over a mesh; by default :func:`shard_blocks`.
        options: the options of ``torch.compile(model, backend="zero3", options=...)``.
        optimizer_bytes: bytes of the optimizer's state for each element: 8 for AdamW in fp32.
        prefetch: whether gathers start early. If False, a gather starts when it is waited for.
        advise: whether to try changes that might help, some seconds for a large model.
        seconds_by_kernel: measured seconds by kernel, from ``measure_kernels``.
        tell: called with the name of each phase of the plan, which takes minutes for a large model.

    Returns:
        The :class:`Plan` of the rank with the largest shards.

    Raises:
        TypeError: ``build`` does not return a module, or ``call`` is not a mapping.
        ValueError: a machine or option is unknown, or a number of ranks or bytes is wrong.
        Zero3Error: the process has a process group, no graph was compiled, or code outside the
            graphs reads parameters.
    """
    machine = machine_of(machine)
    parsed = parse_options(options)
    if optimizer_bytes < 0:
        raise ValueError(f"optimizer_bytes is a number of bytes, got {optimizer_bytes}")
    tell("building and sharding the model")
    with fake_model(build, call, world_size, replicas, shard) as model:
        parameters = all_parameters_of(model, "plan")
        for budget in filter(None, {parameter.budget for parameter in parameters}):
            budget.reserve_states([p for p in parameters if p.budget is budget], optimizer_bytes)
        traced = trace(model, call, tell)
        tokens = call.get("input_ids")
        assumed = Assumptions(machine, optimizer_bytes, prefetch, seconds_by_kernel or {})

        def predict(options: Options) -> Plan:
            graphs = traced.rewrite(options)
            step = simulate(graphs, traced.sources, assumed)
            timeline = step.timeline
            return Plan(
                report=report_of(model, parameters, graphs, traced.breaks, timeline),
                machine=machine,
                ranks=world_size,
                seconds=timeline.seconds("compute", "waiting"),
                computing=timeline.seconds("compute"),
                waiting=timeline.seconds("waiting"),
                flops=step.flops,
                product_seconds=step.product_seconds,
                traffic=step.traffic,
                moved=step.moved,
                peak=sum(timeline.peak.values()),
                memory=timeline.peak,
                tokens=tokens.numel() if isinstance(tokens, torch.Tensor) else 0,
            )

        tell("taking a step")
        found = predict(parsed)
        if not advise:
            return found
        tell("taking steps with other options")
        breaks, padding = map(line_of_break, traced.breaks), _padding(traced)
        quicker = _to_be_quicker(found, parsed, predict)
        return replace(found, advice=(*breaks, *_to_fit(found), *padding, *quicker))


# ---- advice that would make a step quicker or smaller: options are tried, not guessed


def _to_fit(plan: Plan) -> Iterator[str]:
    if plan.fits:
        return
    kind = max(plan.memory, key=plan.memory.__getitem__)
    remedy = {
        "activations": "a smaller batch, or activation checkpointing of each block"
        + ("" if any(plan.moved) else ", or on GPUs the option activations_mb"),
        "gathered": "a smaller gather_bucket_mb and keep_mb, or reshard_after_forward=True",
        "communication": "smaller parameters: one that is gathered alone is held whole",
    }.get(kind, "more ranks")
    yield (
        f"it does not fit: {plan.memory[kind] / 1e9:.1f} GB are {kind}. What helps there: {remedy}"
    )


def _padding(traced: Trace) -> Iterator[str]:
    padded = {}
    for name, parameter in traced.sources.items():
        if not parameter.handle.layout.is_chunked:
            continue
        rows, ranks = parameter.handle.sizes[0], parameter.handle.world_size
        times = -(-rows // ranks) * ranks / max(rows, 1)
        if times > 1.5 and parameter.placeholder.numel() * (times - 1) > 1 << 20:
            padded[name] = f"{rows} rows over {ranks} ranks, {times:.1f} times its bytes"
    if padded:
        name, what = next(iter(padded.items()))
        others = f" and {len(padded) - 1} more" if len(padded) > 1 else ""
        yield (
            f"padding travels: '{name}'{others} has {what}. Shard another dimension: "
            "shard_placement_fn"
        )


def _to_be_quicker(
    plan: Plan, options: Options, predict: Callable[[Options], Plan]
) -> Iterator[str]:
    if plan.waiting < 5 * _WORTH * plan.seconds:
        return
    bucket = 4 * options.gather_bucket_mb
    plans = {
        "keep_mb=inf": predict(replace(options, keep_mb=float("inf"))),
        f"gather_bucket_mb={bucket:g}": predict(replace(options, gather_bucket_mb=bucket)),
    }
    for name, other in sorted(plans.items(), key=lambda item: item[1].seconds):
        saved = 1 - other.seconds / plan.seconds
        if saved >= _WORTH and other.fits:
            peak = f"{other.peak / 1e9:.1f} GB at the peak"
            yield f"the backend's option {name} would save {saved:.0%} of the step: {peak}"
    if plan.fits:
        waits = plan.waiting / plan.seconds
        yield (
            f"{waits:.0%} of the step waits for collectives, whose bytes do not depend on the "
            "batch: a larger batch hides them"
        )
