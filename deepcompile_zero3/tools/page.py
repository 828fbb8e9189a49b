"""A step as a web page: what happens when, how much memory is alive, and tables to search."""

import html
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

from deepcompile_zero3.tools.table import Table, and_more
from deepcompile_zero3.tools.timeline import LANES, Sample, Span, Timeline

# Approximate width of a time axis in pixels. A lane with more spans, or a curve with more samples,
# is thinned out.
_PIXELS = 2500
_NAMES_SHOWN = 5

# Colors of each lane: two shades that distinguish neighbors, and one for bars that a search
# does not find.
_LANE_COLORS = {
    "compute": ("#4c78a8", "#6790bd", "#d9e2ec"),
    "gather": ("#e4812f", "#f09c57", "#f7e1d0"),
    "reduce": ("#4f9d55", "#6db573", "#d9e9da"),
    "waiting": ("#a9a9a9", "#bfbfbf", "#e4e4e4"),
}
_KIND_COLORS = ("#54728c", "#f2b872", "#9fc5e8", "#b6d7a8", "#c9b6e4", "#e6a5a5", "#d9d9d9")
FOUND = "#d6006c"
_LANE, _MEMORY, _GAP, _LEGEND = 34, 150, 44, 30  # heights in pixels


def save_page(
    path: str | os.PathLike[str],
    title: str,
    text: str,
    timelines: Sequence[Timeline],
    tables: Sequence[Table],
) -> None:
    """Writes a page that needs no other file and no network.

    Args:
        path: the path of the file. An existing file is replaced.
        title: the heading of the page.
        text: shown below the title, line by line.
        timelines: drawn below one another, with the same time axis. In long timelines, neighboring
            spans that are too narrow to see are drawn as one.
        tables: shown below the timelines. The text in the page's search box selects the rows that
            contain it, and the spans whose operator or parameters contain it.

    Raises:
        ImportError: plotly is not installed.
        ValueError: a time is infinite or not a number.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            'a page needs plotly; install it with: pip install "deepcompile_zero3[report]"'
        ) from error
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    content = page.substitute(
        title=html.escape(title),
        text=html.escape(text),
        found=FOUND,
        tables="".join(table.as_html() for table in tables),
        drawing=draw(timelines).to_json(engine="json"),  # no name can end the script element
        plotly=get_plotlyjs(),
    )
    Path(path).write_text(content, encoding="utf-8")


def draw(timelines: Sequence[Timeline]) -> Any:
    """Returns a plotly figure of timelines below one another, with linked time axes.

    Spans are bars in lanes, with their names as ``customdata``. Below the lanes is the memory, as
    stacked curves.
    """
    from plotly.graph_objects import Figure
    from plotly.subplots import make_subplots

    duration = max((timeline.end for timeline in timelines), default=0.0)
    panels: list[tuple[Timeline, list[str]]] = []  # a timeline, and its lanes or [] for its memory
    for timeline in timelines:
        if lanes := [lane for lane in LANES if timeline.of(lane)]:
            panels.append((timeline, lanes))
        if timeline.kinds and timeline.memory:
            panels.append((timeline, []))
    if not panels:
        return Figure()
    heights = [_LANE * len(lanes) or _MEMORY for _, lanes in panels]
    height = sum(heights) + _GAP * len(panels)
    titles = [
        _heading(timeline) if lanes or not timeline.spans else "" for timeline, lanes in panels
    ]
    figure = make_subplots(
        rows=len(panels),
        row_heights=heights,
        vertical_spacing=_GAP / height,
        shared_xaxes=True,
        subplot_titles=titles,
    )
    colors = itertools.cycle(_KIND_COLORS)
    legend: dict[str, str] = {}  # colors of kinds of memory
    for row, (timeline, lanes) in enumerate(panels, 1):
        for lane in lanes:
            figure.add_trace(_bars(lane, timeline.of(lane), duration), row, 1)
        if lanes:
            y_axis = {"categoryarray": lanes[::-1], "range": [-0.5, len(lanes) - 0.5]}
        else:
            y_axis = {"title_text": "MiB", "rangemode": "tozero", "nticks": 5}
            samples = list(_thinned(timeline.memory, duration))
            for position, kind in enumerate(timeline.kinds):
                is_new = kind not in legend
                color = legend.setdefault(kind, next(colors) if is_new else "")
                curve = _curve(kind, samples, position, timeline.end)
                figure.add_trace(curve | {"fillcolor": color, "showlegend": is_new}, row, 1)
        figure.update_yaxes(fixedrange=True, **y_axis, row=row)
    figure.update_xaxes(range=[0, _ms(duration)])
    figure.update_xaxes(title={"text": "ms", "standoff": 4}, row=len(panels))
    figure.update_annotations(x=0, xanchor="left", font_size=15)
    return figure.update_layout(
        template="none",
        height=height + 2 * _GAP + _LEGEND,
        margin={"l": 70, "r": 20, "t": _LEGEND + _GAP, "b": _GAP},
        barmode="overlay",
        bargap=0.15,
        hovermode="closest",
        hoverdistance=60,
        hoverlabel={"align": "left", "bgcolor": "#fff", "font_color": "#222"},
        legend={"orientation": "h", "x": 0, "y": 1 + _GAP / height, "yanchor": "bottom"},
        plot_bgcolor="#f7f7f7",
    )


def _heading(timeline: Timeline) -> str:
    peak = sum(timeline.peak.values())
    memory = f", at most {_mib(peak):,.1f} MiB" if peak else ""
    return f"<b>{_escaped(timeline.name)}</b>: {_ms(timeline.end):,.3f} ms{memory}"


# ---- bars


def _bars(lane: str, spans: list[Span], duration: float) -> dict[str, Any]:
    runs = list(_runs(spans, duration))
    *shades, faded = _LANE_COLORS[lane]
    return {
        "type": "bar",
        "orientation": "h",
        "y": [lane] * len(runs),
        "base": [_ms(run[0].start) for run in runs],
        "x": [_ms(run[-1].end - run[0].start) for run in runs],
        "customdata": [
            "\n".join({n: 0 for s in run for n in (s.name, *s.parameters)}) for run in runs
        ],
        "hovertext": list(map(_hover, runs)),
        "hoverinfo": "text",
        "marker": {"color": [shades[i % 2] for i in range(len(runs))], "line": {"width": 0}},
        "selected": {"marker": {"color": FOUND}},
        "unselected": {"marker": {"color": faded, "opacity": 1}},
        "showlegend": False,
    }


def _runs(spans: list[Span], duration: float) -> Iterator[list[Span]]:
    """Yields each span alone or, if there are many, with the neighbors that share its pixel."""
    pixel = duration / _PIXELS if len(spans) > _PIXELS else 0.0
    run: list[Span] = []
    for span in spans:
        if run and span.end - run[0].start >= pixel:
            yield run
            run = []
        run.append(span)
    yield run


def _searched(run: list[Span]) -> str:
    """Returns the names of operators and parameters, each once."""
    return "\n".join(dict.fromkeys(name for span in run for name in (span.name, *span.parameters)))


def _hover(run: list[Span]) -> str:
    """Returns a bar's hover text: operators, times, bytes and the first parameters."""
    counts = Counter(span.name for span in run).most_common()
    lines = [and_more([f"{n} {name}" if n > 1 else name for name, n in counts], _NAMES_SHOWN)]
    start, end = run[0].start, run[-1].end
    within = f" of {_ms(end - start):,.3f} ms" if len(run) > 1 else ""
    busy = sum(span.seconds for span in run)
    lines.append(f"{_ms(busy):,.3f} ms{within}, from {_ms(start):,.3f} ms on")
    if nbytes := sum(span.nbytes for span in run):
        lines.append(f"{_mib(nbytes):,.3f} MiB")
    if parameters := list(dict.fromkeys(name for span in run for name in span.parameters)):
        lines.append(and_more(parameters, _NAMES_SHOWN, "\n"))
    return _escaped("\n".join(lines)).replace("\n", "<br>")


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


def _escaped(text: str) -> str:
    """Escapes text for plotly, which reads tags and ``&lt;`` but not ``&quot;``."""
    return html.escape(text, quote=False)


def _ms(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"a time on a page is a number of seconds, got {seconds}")
    return round(seconds * 1e3, 6)


def _mib(nbytes: int) -> float:
    return nbytes / 2**20
