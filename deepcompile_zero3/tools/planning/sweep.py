"""Plans that differ in one number, side by side."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from deepcompile_zero3.tools.arguments import new_file, positive
from deepcompile_zero3.tools.planning.machine import Machine
from deepcompile_zero3.tools.planning.memory import KINDS
from deepcompile_zero3.tools.planning.predicted import Plan
from deepcompile_zero3.tools.table import Table

Value: TypeAlias = float | str


def _layout(text: str) -> str:
    if text not in LAYOUTS:
        raise ValueError
    return text


# Layouts on several hosts: all ranks have a shard; each host has the model, in shards; and likewise
# with a part of each shard for a host to step.
LAYOUTS = ("flat", "replicas", "parts")
_OF_BACKEND = ("keep_mb", "activations_mb", "gather_bucket_mb")
KNOBS: dict[str, Callable[[str], Value]] = {
    **dict.fromkeys(("ranks", "batch", "sequence"), positive),
    **dict.fromkeys(_OF_BACKEND, float),
    "layout": _layout,
}


def parse(text: str) -> tuple[str, list[Value]]:
    """Returns the name and the values of ``NAME=A,B,...``."""
    knob, _, values = text.partition("=")
    if knob not in KNOBS:
        raise argparse.ArgumentTypeError(f"one of {', '.join(KNOBS)}, got {knob!r}")
    try:
        return knob, [KNOBS[knob](value) for value in values.split(",")]
    except ValueError:
        of = ", ".join(LAYOUTS) if knob == "layout" else "numbers"
        raise argparse.ArgumentTypeError(f"NAME=A,B,... of {of}, got {text!r}") from None


def picture(text: str) -> Path:
    """Returns the absolute path of a new file that :func:`draw` can write."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        message = "a picture needs matplotlib: pip install matplotlib"
        raise argparse.ArgumentTypeError(message) from None
    path, kinds = new_file(text), FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise argparse.ArgumentTypeError(f"a name that ends in .{', .'.join(kinds)}, got {text!r}")
    return path


def arguments_of(knob: str, value: Value, ranks: int, machine: Machine) -> dict[str, Any]:
    """Returns the arguments of the command line that a value changes.

    Raises:
        ValueError: the value is a layout on several hosts, and there is one, or hosts have other
            numbers of ranks.
    """
    if knob != "layout":
        return {knob: value}
    hosts = -(-ranks // machine.ranks_per_host)
    if hosts == 1:
        raise ValueError(
            f"layouts differ between hosts, and {ranks} ranks are on one host of up to "
            f"{machine.ranks_per_host}: pass --set ranks_per_host=N"
        )
    if ranks % machine.ranks_per_host:
        raise ValueError(
            f"layouts give each host a replica, and hosts of {machine.ranks_per_host} ranks do not "
            f"divide {ranks} ranks: pass another --ranks, or --set ranks_per_host=N"
        )
    replicas = 1 if value == "flat" else hosts
    return {"replicas": replicas, "shard_optimizer_over_replicas": value == "parts"}


def table(knob: str, plans: Mapping[Value, Plan]) -> Table:
    """Returns a table with a row for each value.

    What a host sends to others, and how long its link takes for that at least, has columns if there
    are several hosts.
    """
    has_links = any(plan.host_bytes for plan in plans.values())
    rows = [
        (
            str(value),
            f"{plan.seconds * 1e3:.4g}",
            f"{plan.tokens_per_second:,.0f}" if plan.tokens else "",
            f"{plan.waiting / plan.seconds:.1%}",
            f"{plan.utilization:.0%}",
            f"{plan.peak / 1e9:.3g}",
            "yes" if plan.fits else "no",
            *(
                (f"{plan.host_bytes / 1e9:.4g}", f"{plan.link_seconds * 1e3:.4g}")
                if has_links
                else ()
            ),
        )
        for value, plan in plans.items()
    ]
    columns = (knob, "ms", "tokens/s", "waits", "FLOP/s", "GB", "fits")
    links = ("GB a host sends", "link ms") if has_links else ()
    return Table("", (*columns, *links), rows)


def verdict(plans: Mapping[Value, Plan]) -> str:
    """Returns which of the plans that fit is the quickest, beside the one that takes least."""
    fitting = {value: plan for value, plan in plans.items() if plan.fits}
    if not fitting:
        return "none of them fits"
    quickest = min(fitting, key=lambda value: fitting[value].seconds)
    smallest = min(fitting, key=lambda value: fitting[value].peak)

    def told(value: Value) -> str:
        return f"{fitting[value].seconds * 1e3:.4g} ms and {fitting[value].peak / 1e9:.3g} GB"

    line = f"quickest that fits: {quickest}, {told(quickest)}"
    return line if smallest == quickest else f"{line}; least memory: {smallest}, {told(smallest)}"


def draw(title: str, knob: str, plans: Mapping[Value, Plan], path: Path) -> None:
    """Draws bars of the step's seconds and of the memory at the peak, for each value."""
    from matplotlib.figure import Figure

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
