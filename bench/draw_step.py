"""Draws the lanes of a measured step, of ``trace --json``, as an SVG.

python bench/draw_step.py build/step.json docs/images/overlap.svg
"""

import json
import sys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

LANES = {
    "compute": ("computes", "#4878a8"),
    "gather": ("gathers in flight", "#d98b3a"),
    "reduce": ("reductions in flight", "#7aa457"),
    "waiting": ("waits", "#b23a48"),
}
WIDTH, LEFT, ROW, BAR = 860, 150, 34, 22


def draw(measured: dict) -> str:
    """Returns the SVG of a measurement."""
    spans = measured["timeline"]["spans"]
    end = max(span["end"] for span in spans)
    scale = (WIDTH - LEFT - 20) / end
    height = ROW * len(LANES) + 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for row, (lane, (label, color)) in enumerate(LANES.items()):
        y = 10 + row * ROW
        lines.append(f'<text x="8" y="{y + 16}">{escape(label)}</text>')
        lines += [
            f'<rect x="{LEFT + start * scale:.1f}" y="{y}" width="{(stop - start) * scale:.1f}" '
            f'height="{BAR}" fill="{color}" stroke="#ffffff" stroke-width="0.5"/>'
            for start, stop in _joined(
                ((s["start"], s["end"]) for s in spans if s["lane"] == lane),
                0.5 / scale if lane == "compute" else -1,  # each collective is a bar
            )
        ]
    y = 10 + ROW * len(LANES)
    lines.append(f'<path d="M{LEFT} {y}H{WIDTH - 20}" stroke="#333333"/>')
    tick = _tick(end)
    for number in range(int(end / tick) + 1):
        x = LEFT + number * tick * scale
        lines.append(f'<path d="M{x:.1f} {y}v5" stroke="#333333"/>')
        ms = f"{number * tick * 1e3:.0f} ms"
        lines.append(f'<text x="{x:.1f}" y="{y + 20}" text-anchor="middle">{ms}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _joined(spans: Iterable[tuple[float, float]], gap: float) -> Iterator[tuple[float, float]]:
    """Yields spans in order, with those joined that lie closer than ``gap``."""
    last = None
    for start, end in sorted(spans):
        if last is not None and start - last[1] <= gap:
            last = last[0], max(end, last[1])
            continue
        if last is not None:
            yield last
        last = start, end
    if last is not None:
        yield last


def _tick(seconds: float) -> float:
    """Returns a step of an axis that has four to ten of them."""
    return next(t for t in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if seconds / t <= 10)


if __name__ == "__main__":
    source, target = sys.argv[1:]
    Path(target).write_text(draw(json.loads(Path(source).read_text())), encoding="utf-8")
