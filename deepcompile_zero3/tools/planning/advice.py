"""Advice that would make a planned step quicker or smaller: options are tried, not guessed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from deepcompile_zero3.options import Options
from deepcompile_zero3.tools.planning.graphs import Trace
from deepcompile_zero3.tools.planning.predicted import Plan
from deepcompile_zero3.tools.report import line_of_break

_WORTH = 0.02  # fraction of a step


def advice_for(
    plan: Plan, options: Options, traced: Trace, predict: Callable[[Options], Plan]
) -> tuple[str, ...]:
    """Returns advice on graph breaks, memory, padding and time, the quickest option first.

    Args:
        plan: the plan to improve.
        options: the options of the plan.
        traced: the traced model of the plan.
        predict: makes the plan for other options.
    """
    breaks = map(line_of_break, traced.breaks)
    quicker = _to_be_quicker(plan, options, predict)
    return (*breaks, *_to_fit(plan), *_padding(traced), *quicker)


def _to_fit(plan: Plan) -> Iterator[str]:
    if plan.fits:
        return
    kind = max(plan.memory, key=plan.memory.__getitem__)
    remedy = {
        "activations": "a smaller batch, or activation checkpointing of each block",
        "gathered": "a smaller gather_bucket_mb and keep_mb, or reshard_after_forward=True",
        "communication": "smaller parameters: one that is gathered alone is held whole",
    }.get(kind, "more ranks")
    yield (
        f"it does not fit: {plan.memory[kind] / 1e9:.1f} GB are {kind}. What helps there: {remedy}"
    )


def _padding(traced: Trace) -> Iterator[str]:
    padded = {}
    for name, parameter in traced.parameters.items():
        rows, ranks = parameter.handle.sizes[0], parameter.handle.world_size
        sent = -(-rows // ranks) * ranks
        if sent > 1.5 * rows and parameter.placeholder.numel() * (sent / rows - 1) > 1 << 20:
            padded[name] = f"{rows} rows over {ranks} ranks, {sent / rows:.1f} times its bytes"
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
    tried = {
        "keep_mb=inf": replace(options, keep_mb=float("inf")),
        f"gather_bucket_mb={options.gather_bucket_mb * 4:g}": replace(
            options, gather_bucket_mb=options.gather_bucket_mb * 4
        ),
    }
    plans = {name: predict(other) for name, other in tried.items()}
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
