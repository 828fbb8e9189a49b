"""Reports results as a Markdown table and as a plot."""

from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = {
    "mode": "what",
    "min": "quickest step, ms; a step is as slow as its slowest rank",
    "median": "ms",
    "min/floor": "of the quickest steps",
    "paired/floor": "median over rounds of (this step / the floor's step in the same round)",
    "CPU/floor": "processor time of all ranks, medians",
    "system": "share of it that is the kernel's",
    "idle": "share of a step in which a rank's computing thread did not run",
    "tokens/s": "all ranks together, by the median",
    "rest": "MB resident of a rank between steps, the highest",
    "peak": "MB resident of a rank in a step, the highest",
    "host": "MB of all ranks together between steps, what they share once (PSS)",
    "all-gather": "MB of full buffers (collectives), a rank and step",
    "reduce": "MB of full buffers (collectives), reduce-scatter or all-reduce",
}


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table with a row for each mode."""
    modes = results["modes"]
    base = _base(modes)
    columns = [column.replace("floor", base) for column in COLUMNS]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    lines += [_line(name, results, base) for name in modes]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _base(modes: dict[str, Any]) -> str:
    """Returns the mode that the others are compared with."""
    return "floor" if "floor" in modes else next(iter(modes))


def _line(name: str, results: dict[str, Any], base: str) -> list[str]:
    mode, floor = results["modes"][name], results["modes"][base]
    steps, floors = _walls(mode), _walls(floor)
    cpu = median(_cpu(step) for step in mode["steps"])
    system = median(sum(cost["system"] for cost in step) for step in mode["steps"])
    idle = median(max(1 - c["main"] / c["wall"] for c in step) for step in mode["steps"])
    sent = mode["collectives"]
    reduced = {kind: sent.get(kind, (0, 0)) for kind in ("reduce_scatter", "all_reduce")}
    return [
        name,
        f"{1e3 * min(steps):.0f}",
        f"{1e3 * median(steps):.0f}",
        f"{min(steps) / min(floors):.2f}",
        f"{median(a / b for a, b in zip(steps, floors, strict=True)):.2f}",
        f"{cpu / median(_cpu(step) for step in floor['steps']):.2f}",
        f"{system / cpu:.0%}",
        f"{idle:.0%}",
        f"{results['tokens'] / median(steps):,.0f}",
        f"{max(rank['resident'] for rank in mode['memory']) / 1e6:.0f}",
        f"{max(rank['peak'] for rank in mode['memory']) / 1e6:.0f}",
        f"{sum(rank['proportional'] for rank in mode['memory']) / 1e6:.0f}",
        _sent(sent.get("all_gather", (0, 0))),
        _sent(tuple(map(sum, zip(*reduced.values(), strict=True)))),
    ]


def _sent(counted: tuple[int, ...]) -> str:
    number, nbytes = counted
    return f"{nbytes / 1e6:.0f} ({number})"


def _walls(mode: dict[str, Any]) -> list[float]:
    return [max(cost["wall"] for cost in step) for step in mode["steps"]]


def _cpu(step: list[dict[str, float]]) -> float:
    return sum(cost["user"] + cost["system"] for cost in step)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Plots the quickest step relative to the base mode's, a panel for each workload."""
    from matplotlib.figure import Figure

    rows = max(len(result["modes"]) for result in results)
    figure = Figure(figsize=(5 * len(results), 1 + 0.35 * rows), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for panel, result in zip(panels, results, strict=True):
        modes = result["modes"]
        base = _base(modes)
        floor = min(_walls(modes[base]))
        ratios = [min(_walls(mode)) / floor for mode in modes.values()]
        colors = ["tab:orange" if name.startswith("zero3") else "tab:blue" for name in modes]
        panel.bar_label(panel.barh(list(modes), ratios, color=colors), fmt="%.2f", padding=2)
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.set_title(result["workload"])
        panel.set_xlabel(f"quickest step / {base}")
    figure.savefig(path, dpi=120)


def plot_first_steps(found: list[dict[str, Any]], path: Path) -> None:
    """Plots seconds of a first step over the number of layers, a line for each mode.

    Args:
        found: "mode", "layers" and the seconds "cold" and "warm" of each measurement.
        path: where the picture goes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for panel, temperature in zip(figure.subplots(1, 2), ("cold", "warm"), strict=True):
        for mode in dict.fromkeys(each["mode"] for each in found):
            points = sorted((e["layers"], e[temperature]) for e in found if e["mode"] == mode)
            panel.plot(*zip(*points, strict=True), marker="o", label=mode)
        panel.set_title(f"compilers' caches {'empty' if temperature == 'cold' else 'full'}")
        panel.set_xlabel("layers")
        panel.set_ylabel("first step, s")
        panel.set_ylim(bottom=0)
    panel.legend()
    figure.savefig(path, dpi=120)
