"""A measured step, beside a predicted one."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from deepcompile_zero3.tools.document import Document
from deepcompile_zero3.tools.table import Cell, Table, and_more
from deepcompile_zero3.tools.timeline import Timeline

_WAITS_SHOWN = 5


@dataclass(frozen=True)
class Measurement(Document):
    """A step that was profiled."""

    script: str  # the name of its file
    rank: int
    number: int  # number of the step, counted from 1
    durations: tuple[float, ...]  # seconds of all profiled steps
    duration: float  # seconds of this step, which is their median
    timeline: Timeline
    is_sharded: bool  # whether this library sharded a model
    compiles: bool  # whether torch compiled something in the step
    predicted: Timeline | None = None
    remark: str = ""  # why there is no prediction, or what the prediction leaves out

    def _title(self) -> str:
        return f"{self.script}: step {self.number} of rank {self.rank}"

    def _timelines(self) -> list[Timeline]:
        return [self.timeline, self.predicted] if self.predicted else [self.timeline]

    def _parts(self) -> Iterator[str | Table]:
        others = ", ".join(map(_ms, self.durations))
        name = f"step {self.number} of rank {self.rank}"
        yield f"{name}: {_ms(self.duration)} ms, the median of {others}"
        if self.compiles:
            yield "torch compiled something in this step: skip more of them with --skip"
        if self.predicted:
            seconds = self.predicted.seconds("compute", "waiting")
            off = seconds / self.duration - 1
            than = f"{abs(off):.0%} {'less' if off < 0 else 'more'} than measured"
            yield f"{self.predicted.name}: {_ms(seconds)} ms, {than}"
        if self.remark:
            yield self.remark if self.predicted else f"no prediction: {self.remark}"
        yield ""
        predicted = ("predicted",) if self.predicted else ()
        yield Table("", ("", "number", "ms", *predicted, "of step"), self._summary())
        waits = heapq.nlargest(_WAITS_SHOWN, self.timeline.of("waiting"), lambda s: s.seconds)
        if waits:
            yield ""
            rows = [(s.name, and_more(s.parameters), s.seconds * 1e3, s.start * 1e3) for s in waits]
            yield Table("", ("longest waits", "parameters", "ms", "at ms"), rows)
        if not self.is_sharded:
            yield ""
            yield "nothing is sharded with deepcompile_zero3.fully_shard: see its README"

    def _summary(self) -> list[tuple[Cell, ...]]:
        names = ("compute", "waiting", "gathers in flight", "reductions in flight")
        rows = [
            self._row(name, len(self.timeline.of(lane)), self.timeline.seconds(lane), lane)
            for name, lane in zip(names, ("compute", "waiting", "gather", "reduce"), strict=True)
        ]
        rest = max(self.duration - self.timeline.seconds("compute", "waiting"), 0.0)
        rows.insert(2, self._row("the rest", "", rest))
        if self.predicted:
            rows.insert(0, self._row("step", "", self.duration, "compute", "waiting"))
        return rows

    def _row(self, name: str, number: Cell, seconds: float, *lanes: str) -> tuple[Cell, ...]:
        """Returns a row: measured seconds, then seconds of the prediction's ``lanes``, if any."""
        predicted: tuple[Cell, ...] = ()
        if self.predicted:
            predicted = (self.predicted.seconds(*lanes) * 1e3 if lanes else "",)
        part = f"{seconds / self.duration:.0%}" if self.duration else ""
        return name, number, seconds * 1e3, *predicted, part


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"
