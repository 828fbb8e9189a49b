"""The timeline of a step: predicted or measured."""

from dataclasses import dataclass

LANES = ("compute", "gather", "reduce", "waiting")


@dataclass(frozen=True)
class Span:
    """An interval of a lane.

    Attributes:
        lane: one of LANES. In "waiting", the computation waits for a gather or a reduction.
        name: the operator, or "all_gather", "reduce_scatter", "all_reduce".
        start, end: seconds since the step began.
        parameters: FQNs of the parameters that the span gathers, reduces or waits for.
        nbytes: bytes of the full tensors that the span gathers or reduces.
    """

    lane: str
    name: str
    start: float
    end: float
    parameters: tuple[str, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """A step of one rank.

    Attributes:
        name: such as "predicted" or "measured".
        spans: the spans of all lanes; spans of one lane do not overlap.
        kinds: kinds of memory, such as "shards", "gathered", "activations".
        memory: seconds since the step began, and the bytes of each of ``kinds`` from then on.
    """

    name: str
    spans: tuple[Span, ...]
    kinds: tuple[str, ...] = ()
    memory: tuple[tuple[float, tuple[int, ...]], ...] = ()
