"""Reports a measured step as printed tables, as a page or as data."""

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table as Text

from deepcompile_zero3.tools import page
from deepcompile_zero3.tools.report import text_of
from deepcompile_zero3.tools.timeline import Span, Timeline

_WAITS_SHOWN = 5


@dataclass(frozen=True)
class Measurement:
    """A step that was profiled. ``print`` it, or see :meth:`to_dict`.

    Attributes:
        script: the name of its file.
        rank: the rank that took the step.
        number: the number of the step, counted from 1.
        durations: seconds of all profiled steps.
        duration: seconds of this step, which is their median.
        timeline: the timeline of this step.
        is_sharded: whether this library sharded a model.
        compiles: whether torch compiled something in the step.
        predicted: the timeline of a plan, if a prediction was requested.
        remark: why there is no prediction, or what the prediction leaves out.
    """

    script: str
    rank: int
    number: int
    durations: tuple[float, ...]
    duration: float
    timeline: Timeline
    is_sharded: bool
    compiles: bool
    predicted: Timeline | None = None
    remark: str = ""

    def show(self, page_path: str | None, data_path: str | None) -> None:
        """Prints the measurement and writes the files whose paths are given."""
        print(self, flush=True)
        if data_path is not None:
            Path(data_path).write_text(json.dumps(self.to_dict()), encoding="utf-8")
        if page_path is not None:
            title = f"{self.script}: step {self.number} of rank {self.rank}"
            timelines = [self.timeline, self.predicted] if self.predicted else [self.timeline]
            page.save_page(page_path, title, str(self), timelines, list(self._tables()))

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as numbers, strings, lists and dicts, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return text_of(self._parts())

    def _parts(self) -> Iterator[Any]:
        name = f"step {self.number} of rank {self.rank}"
        others = ", ".join(map(_ms, self.durations))
        yield f"{name}: {_ms(self.duration)} ms, the median of {others}"
        if self.compiles:
            yield "torch compiled something in this step: skip more of them with --skip"
        if self.predicted:
            seconds = _total(self.predicted, "compute", "waiting")
            off = seconds / self.duration - 1
            than = f"{abs(off):.0%} {'less' if off < 0 else 'more'} than measured"
            yield f"{self.predicted.name}: {_ms(seconds)} ms, {than}"
        if self.remark:
            yield self.remark if self.predicted else f"no prediction: {self.remark}"
        yield ""
        predicted = ("predicted",) if self.predicted else ()
        yield _text(("", "number", "ms", *predicted, "of step"), self._summary())
        waits = heapq.nlargest(_WAITS_SHOWN, self._lane("waiting"), key=_duration)
        if waits:
            yield ""
            yield _text(
                ("longest waits", "parameters", "ms", "at ms"),
                ((s.name, _names(s.parameters), _ms(_duration(s)), _ms(s.start)) for s in waits),
            )
        if not self.is_sharded:
            yield ""
            yield "nothing is sharded with deepcompile_zero3.fully_shard: see its README"

    def _summary(self) -> Iterator[tuple[str, ...]]:
        rest = max(self.duration - _total(self.timeline, "compute", "waiting"), 0.0)
        if self.predicted:
            yield self._row("step", "", self.duration, "compute", "waiting")
        yield self._row_of("compute", "compute")
        yield self._row_of("waiting", "waiting")
        yield self._row("the rest", "", rest)
        yield self._row_of("gathers in flight", "gather")
        yield self._row_of("reductions in flight", "reduce")

    def _row_of(self, name: str, lane: str) -> tuple[str, ...]:
        return self._row(name, str(len(self._lane(lane))), _total(self.timeline, lane), lane)

    def _row(self, name: str, number: str, seconds: float, *lanes: str) -> tuple[str, ...]:
        """Returns a row: measured seconds, then seconds of the prediction's ``lanes``, if any."""
        beside: tuple[str, ...] = ()
        if self.predicted:
            beside = (_ms(_total(self.predicted, *lanes)) if lanes else "",)
        return name, number, _ms(seconds), *beside, self._part(seconds)

    def _part(self, seconds: float) -> str:
        return f"{seconds / self.duration:.0%}" if self.duration else ""

    def _lane(self, name: str) -> list[Span]:
        return [span for span in self.timeline.spans if span.lane == name]

    def _tables(self) -> Iterator[page.Table]:
        moved = sorted(self._lane("gather") + self._lane("reduce"), key=lambda span: span.start)
        yield page.Table(
            "Collectives",
            ("collective", "parameters", "MiB", "starts, ms", "in flight, ms"),
            tuple((s.name, ", ".join(s.parameters), s.nbytes / 2**20, *_times(s)) for s in moved),
        )
        yield page.Table(
            "Waits",
            ("for", "parameters", "starts, ms", "takes, ms"),
            tuple((s.name, _names(s.parameters), *_times(s)) for s in self._lane("waiting")),
        )
        calls: dict[str, list[float]] = defaultdict(list)
        for span in self._lane("compute"):
            calls[span.name].append(_duration(span) * 1e3)
        rows = sorted(((name, len(ms), sum(ms)) for name, ms in calls.items()), key=itemgetter(2))
        yield page.Table("Operators", ("operator", "calls", "ms"), tuple(rows[::-1]))


def _text(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Text:
    table = Text(box=None, pad_edge=False, header_style="")
    for column in columns:
        is_number = column in ("number", "ms", "predicted", "of step", "at ms")
        table.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return table


def _total(timeline: Timeline, *lanes: str) -> float:
    """Returns the seconds of all spans of the lanes."""
    return sum(_duration(span) for span in timeline.spans if span.lane in lanes)


def _duration(span: Span) -> float:
    return span.end - span.start


def _times(span: Span) -> tuple[float, float]:
    """Returns the start and the duration of a span, in ms."""
    return span.start * 1e3, _duration(span) * 1e3


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def _names(names: tuple[str, ...]) -> str:
    """Returns the first name and the number of further names."""
    more = len(names) - 1
    return ", ".join(names[:1]) + (f" and {more} more" if more > 0 else "")
