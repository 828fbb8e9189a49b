"""Plans that differ in one number, side by side."""

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from deepcompile_zero3.tools.planning.memory import KINDS
from deepcompile_zero3.tools.planning.predicted import Plan


def table(knob: str, plans: Mapping[float, Plan]) -> Table:
    """Returns a table with a row for each value."""
    columns = (knob, "ms", "tokens/s", "waits", "FLOP/s", "GB", "fits")
    result = Table(*columns, box=None, pad_edge=False)
    for column in result.columns:
        column.justify = "right"
    for value, plan in plans.items():
        result.add_row(
            str(value),
            f"{plan.seconds * 1e3:.4g}",
            f"{plan.tokens_per_second:,.0f}" if plan.tokens else "",
            f"{plan.waiting / plan.seconds:.1%}",
            f"{plan.utilisation:.0%}",
            f"{plan.peak / 1e9:.3g}",
            "yes" if plan.fits else "no",
        )
    return result


def draw(title: str, knob: str, plans: Mapping[float, Plan], path: Path) -> None:
    """Draws bars of the step's seconds and of the memory at the peak, for each value."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    names = list(map(str, plans))
    figure = Figure(figsize=(10, 4), layout="constrained")
    time, memory = figure.subplots(1, 2)
    figure.suptitle(title)
    computing = [plan.computing for plan in plans.values()]
    waiting = [plan.waiting for plan in plans.values()]
    time.bar(names, computing, label="computing", color="#4c78a8")
    time.bar(names, waiting, bottom=computing, label="waiting", color="#bfbfbf")
    time.set_ylabel("seconds a step")
    bottom = [0.0] * len(names)
    for kind in KINDS:
        heights = [plan.memory[kind] / 1e9 for plan in plans.values()]
        memory.bar(names, heights, bottom=bottom, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    limit = min(plan.machine.memory for plan in plans.values()) / 1e9
    if limit < 10 * max(bottom):
        memory.axhline(limit, color="black", linestyle=":", label="the machine's")
    memory.set_ylabel("GB at the peak")
    for panel in (time, memory):
        panel.set_xlabel(knob)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=110)
