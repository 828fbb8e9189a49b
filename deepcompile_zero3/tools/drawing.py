"""Timelines as plotly figures: spans are bars in lanes, memory is stacked curves below them."""

import html
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from deepcompile_zero3.tools.timeline import LANES, Span, Timeline

Sample: TypeAlias = tuple[float, tuple[int, ...]]

# Approximate width of a time axis. A lane with more spans, or a curve with more samples, is
# thinned out.
_PIXELS = 2500
_NAMES_SHOWN = 5

# Colours of each lane: two shades that distinguish neighbours, and one for bars that a search
# does not find.
_LANE_COLORS = {
    "compute": ("#4c78a8", "#6790bd", "#d9e2ec"),
    "gather": ("#e4812f", "#f09c57", "#f7e1d0"),
    "reduce": ("#4f9d55", "#6db573", "#d9e9da"),
    "waiting": ("#a9a9a9", "#bfbfbf", "#e4e4e4"),
}
_KIND_COLORS = ("#54728c", "#f2b872", "#9fc5e8", "#b6d7a8", "#c9b6e4", "#e6a5a5", "#d9d9d9")
FOUND = "#d6006c"

# Heights in pixels.
_LEGEND, _HEADING, _LANE, _GAP, _MEMORY, _AXIS = 28, 34, 34, 12, 150, 44


@dataclass(frozen=True)
class Drawing:
    """The figure that a page draws, and the names that it searches.

    Attributes:
        traces: plotly's traces; the traces of lanes come first.
        layout: plotly's layout.
        names: names of operators and parameters, each once.
        bars: for each bar of each lane's trace, the positions of its names in ``names``.
    """

    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    names: list[str]
    bars: list[list[list[int]]]


def draw(timelines: Sequence[Timeline]) -> Drawing:
    """Draws timelines below one another, with linked time axes."""
    duration = max(map(_end_of, timelines), default=0.0)
    layout = _Layout(duration)
    lanes: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    names: dict[str, int] = {}
    bars: list[list[list[int]]] = []
    kinds: dict[str, str] = {}
    colors = itertools.cycle(_KIND_COLORS)
    for timeline in timelines:
        spans = {lane: [span for span in timeline.spans if span.lane == lane] for lane in LANES}
        used = [lane for lane in LANES if spans[lane]]
        lane_axes, memory_axes = layout.add(timeline, used)
        for lane in used:
            runs = list(_runs(spans[lane], duration))
            lanes.append(_bars(lane, runs) | lane_axes)
            bars.append(
                [[names.setdefault(name, len(names)) for name in _names_of(run)] for run in runs]
            )
        samples = list(_thinned(timeline.memory, duration))
        for position, kind in enumerate(timeline.kinds):
            is_new = kind not in kinds
            if is_new:
                kinds[kind] = next(colors)
            own = {"fillcolor": kinds[kind], "showlegend": is_new}
            curves.append(_curve(kind, samples, position, _end_of(timeline)) | memory_axes | own)
    return Drawing(lanes + curves, layout.finished(), list(names), bars)


def _end_of(timeline: Timeline) -> float:
    times = itertools.chain((s.end for s in timeline.spans), (time for time, _ in timeline.memory))
    return max(times, default=0.0)


# ---- bars


def _runs(spans: list[Span], duration: float) -> Iterator[list[Span]]:
    """Yields each span alone or, if there are many, with the neighbours that share its pixel."""
    pixel = duration / _PIXELS if len(spans) > _PIXELS else 0.0
    run: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if run and span.end - run[0].start >= pixel:
            yield run
            run = []
        run.append(span)
    yield run


def _names_of(run: list[Span]) -> dict[str, None]:
    """Returns the names of operators and parameters, each once."""
    return dict.fromkeys(name for span in run for name in (span.name, *span.parameters))


def _bars(lane: str, runs: list[list[Span]]) -> dict[str, Any]:
    *shades, faded = _LANE_COLORS[lane]
    colors = list(itertools.islice(itertools.cycle(shades), len(runs)))
    return {
        "type": "bar",
        "orientation": "h",
        "y": [lane] * len(runs),
        "base": [_ms(run[0].start) for run in runs],
        "x": [_ms(run[-1].end - run[0].start) for run in runs],
        "hovertext": list(map(_hover, runs)),
        "hoverinfo": "text",
        "marker": {"color": colors, "line": {"width": 0}},
        "selected": {"marker": {"color": FOUND}},
        "unselected": {"marker": {"color": faded, "opacity": 1}},
        "showlegend": False,
    }


def _hover(run: list[Span]) -> str:
    """Returns a bar's hover text: operators, times, bytes and the first parameters."""
    counts = Counter(span.name for span in run).most_common()
    lines = [_first([f"{n} {name}" if n > 1 else name for name, n in counts], ", ")]
    start, end = run[0].start, run[-1].end
    within = f" of {_ms(end - start):,.3f} ms" if len(run) > 1 else ""
    busy = sum(span.end - span.start for span in run)
    lines.append(f"{_ms(busy):,.3f} ms{within}, from {_ms(start):,.3f} ms on")
    if nbytes := sum(span.nbytes for span in run):
        lines.append(f"{_mib(nbytes):,.3f} MiB")
    if parameters := list(dict.fromkeys(name for span in run for name in span.parameters)):
        lines.append(_first(parameters, "\n"))
    return _escaped("\n".join(lines)).replace("\n", "<br>")


def _first(words: list[str], separator: str) -> str:
    """Joins the first words and tells how many more there are."""
    more = len(words) - _NAMES_SHOWN
    shown = separator.join(words[:_NAMES_SHOWN])
    return f"{shown}{separator}and {more} more" if more > 0 else shown


# ---- memory


def _thinned(memory: Sequence[Sample], duration: float) -> Iterator[Sample]:
    """Yields all samples or, if there are many, the highest and the last of each pixel."""
    if len(memory) <= _PIXELS or not duration:
        yield from memory
        return
    for _, group in itertools.groupby(memory, lambda sample: int(sample[0] / duration * _PIXELS)):
        samples = list(group)
        highest = max(samples, key=lambda sample: sum(sample[1]))
        yield highest
        if highest is not samples[-1]:
            yield samples[-1]


def _curve(kind: str, samples: list[Sample], position: int, end: float) -> dict[str, Any]:
    """Returns the curve of one kind of memory, stacked on earlier kinds and extended to ``end``."""
    last = samples[-1:]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [_ms(time) for time, _ in samples] + [_ms(end) for _ in last],
        "y": [round(_mib(nbytes[position]), 4) for _, nbytes in samples + last],
        "line": {"shape": "hv", "width": 0},
        "stackgroup": "memory",
        "name": _escaped(kind),
        "legendgroup": _escaped(kind),
        "hovertemplate": "%{fullData.name}: %{y:,.3f} MiB<br>from %{x:,.3f} ms on<extra></extra>",
    }


# ---- layout


class _Layout:
    """Stacks timelines from the top down, in pixels, until ``finished`` is called."""

    def __init__(self, duration: float) -> None:
        self._range = [0, _ms(duration)]
        self._numbers = itertools.count(2)  # plotly calls its first axes "x" and "y"
        self._height = _LEGEND
        self._axes: dict[str, dict[str, Any]] = {}
        self._headings: list[dict[str, Any]] = []

    def add(self, timeline: Timeline, lanes: list[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Reserves room for a timeline and returns the axes of its lanes and of its memory."""
        number = next(self._numbers)
        x, above, below = f"x{number}", f"y{2 * number}", f"y{2 * number + 1}"
        self._headings.append(
            {
                "text": _heading(timeline),
                "xref": "paper",
                "x": 0,
                "xanchor": "left",
                "yref": "paper",
                "y": self._height + _HEADING / 2,
                "yanchor": "middle",
                "showarrow": False,
                "font": {"size": 15},
            }
        )
        self._height += _HEADING
        self._axes[f"yaxis{above[1:]}"] = {
            "domain": self._room(_LANE * len(lanes)),
            "anchor": x,
            "type": "category",
            "categoryarray": lanes[::-1],
            "range": [-0.5, len(lanes) - 0.5],
            "fixedrange": True,
        }
        has_memory = bool(timeline.kinds and timeline.memory)
        if has_memory:
            self._height += _GAP
            self._axes[f"yaxis{below[1:]}"] = {
                "domain": self._room(_MEMORY),
                "anchor": x,
                "title": {"text": "MiB"},
                "rangemode": "tozero",
                "nticks": 5,
                "fixedrange": True,
            }
        self._axes[f"xaxis{number}"] = {
            "anchor": below if has_memory else above,
            "range": self._range,
            "matches": "x2",
            "title": {"text": "ms", "standoff": 4},
        }
        self._height += _AXIS
        return {"xaxis": x, "yaxis": above}, {"xaxis": x, "yaxis": below}

    def _room(self, height: int) -> list[int]:
        """Reserves ``height`` pixels and returns their lower and upper end."""
        self._height += height
        return [self._height, self._height - height]

    def finished(self) -> dict[str, Any]:
        """Returns plotly's layout: from the bottom up, in fractions of the height."""
        for axis in self._axes.values():
            if "domain" in axis:
                axis["domain"] = [1 - pixels / self._height for pixels in axis["domain"]]
        for heading in self._headings:
            heading["y"] = 1 - heading["y"] / self._height
        return self._axes | {
            "height": self._height,
            "margin": {"l": 70, "r": 20, "t": 0, "b": 0},
            "annotations": self._headings,
            "barmode": "overlay",
            "bargap": 0.15,
            "hovermode": "closest",
            "hoverdistance": 60,
            "hoverlabel": {"align": "left", "bgcolor": "#fff", "font": {"color": "#222"}},
            "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "top"},
            "plot_bgcolor": "#f7f7f7",
        }


def _heading(timeline: Timeline) -> str:
    peak = max((sum(nbytes) for _, nbytes in timeline.memory), default=0)
    memory = f", at most {_mib(peak):,.1f} MiB" if peak else ""
    return f"<b>{_escaped(timeline.name)}</b>: {_ms(_end_of(timeline)):,.3f} ms{memory}"


def _escaped(text: str) -> str:
    """Escapes text for plotly, which reads tags and ``&lt;`` but not ``&quot;``."""
    return html.escape(text, quote=False)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)


def _mib(nbytes: int) -> float:
    return nbytes / 2**20
