"""The timeline of a step: predicted or measured."""

from dataclasses import dataclass
from typing import TypeAlias

LANES = ("compute", "gather", "reduce", "waiting")

# Seconds since the step began, and the bytes of each kind of memory from then on.
Sample: TypeAlias = tuple[float, tuple[int, ...]]


@dataclass(frozen=True)
class Span:
    """An interval of a lane, in seconds since the step began."""

    lane: str  #: one of LANES; in "waiting", the computation waits for a gather or a reduction
    name: str  #: the operator, or "all_gather", "reduce_scatter", "all_reduce"
    start: float
    end: float
    parameters: tuple[str, ...] = ()  #: FQNs of the parameters in the collective
    nbytes: int = 0  #: of the full tensors that are gathered or reduced

    @property
    def seconds(self) -> float:
        """The duration of the span."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """A step of one rank."""

    name: str  #: such as "measured"
    spans: tuple[Span, ...]  #: of all lanes; spans of one lane do not overlap
    kinds: tuple[str, ...] = ()  #: of memory, such as "shards", "gathered", "activations"
    memory: tuple[Sample, ...] = ()

    def of(self, *lanes: str) -> list[Span]:
        """Returns the spans of some lanes, by their start."""
        return sorted((s for s in self.spans if s.lane in lanes), key=lambda span: span.start)

    def seconds(self, *lanes: str) -> float:
        """Returns the seconds of all spans of some lanes."""
        return sum(span.seconds for span in self.spans if span.lane in lanes)

    @property
    def end(self) -> float:
        """Seconds from the beginning of the step to its last event."""
        return max([0.0, *(s.end for s in self.spans), *(time for time, _ in self.memory)])

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind when the most memory is alive."""
        most = max((nbytes for _, nbytes in self.memory), key=sum, default=None)
        return {} if most is None else dict(zip(self.kinds, most, strict=True))
