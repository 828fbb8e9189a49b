"""Plans that differ in one number, side by side."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepcompile_zero3.tools.planning.memory import KINDS
from deepcompile_zero3.tools.planning.predicted import Plan
from deepcompile_zero3.tools.table import Table

_OF_BACKEND = ("keep_mb", "activations_mb", "gather_bucket_mb")
KNOBS = {"ranks": int, "batch": int, "sequence": int, **dict.fromkeys(_OF_BACKEND, float)}


def parse(text: str) -> tuple[str, list[float]]:
    """Returns the name and the values of ``NAME=A,B,...``."""
    knob, _, values = text.partition("=")
    if knob not in KNOBS:
        raise argparse.ArgumentTypeError(f"one of {', '.join(KNOBS)}, got {knob!r}")
    try:
        return knob, [KNOBS[knob](value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"NAME=A,B,... of numbers, got {text!r}") from None


def table(knob: str, plans: Mapping[float, Plan]) -> Table:
    """Returns a table with a row for each value."""
    rows = [
        (
            str(value),
            f"{plan.seconds * 1e3:.4g}",
            f"{plan.tokens_per_second:,.0f}" if plan.tokens else "",
            f"{plan.waiting / plan.seconds:.1%}",
            f"{plan.utilization:.0%}",
            f"{plan.peak / 1e9:.3g}",
            "yes" if plan.fits else "no",
        )
        for value, plan in plans.items()
    ]
    return Table("", (knob, "ms", "tokens/s", "waits", "FLOP/s", "GB", "fits"), rows)


def draw(title: str, knob: str, plans: Mapping[float, Plan], path: Path) -> None:
    """Draws bars of the step's seconds and of the memory at the peak, for each value."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    names = list(map(str, plans))
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    time, memory = figure.subplots(1, 2)
    bars: list[tuple[Any, str, list[float], str | None]] = [
        (time, "computing", [plan.computing for plan in plans.values()], "#4c78a8"),
        (time, "waiting", [plan.waiting for plan in plans.values()], "#bfbfbf"),
    ]
    for kind in KINDS:
        bars.append((memory, kind, [plan.memory[kind] / 1e9 for plan in plans.values()], None))
    tops = {panel: [0.0] * len(names) for panel in (time, memory)}
    for panel, label, heights, color in bars:
        panel.bar(names, heights, bottom=tops[panel], label=label, color=color)
        tops[panel] = [top + height for top, height in zip(tops[panel], heights, strict=True)]
    limit = min(plan.machine.memory for plan in plans.values()) / 1e9
    if limit < 10 * max(tops[memory]):
        memory.axhline(limit, color="black", linestyle=":", label="the machine's")
    for panel, unit in ((time, "seconds a step"), (memory, "GB at the peak")):
        panel.set_ylabel(unit)
        panel.set_xlabel(knob)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=110)
