"""What happens when in a step: predicted, or measured."""

from dataclasses import dataclass

LANES = ("compute", "gather", "reduce", "waiting")


@dataclass(frozen=True)
class Span:
    """Something that takes time.

    Attributes:
        lane: one of LANES; "waiting" is of the computation, for a gather or a reduction.
        name: the operator, or "all_gather", "reduce_scatter", "all_reduce".
        start, end: seconds since the step began.
        parameters: names of those that it gathers, reduces or waits for.
        nbytes: of the full tensors that it gathers or reduces.
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
        name: as "predicted" or "measured".
        spans: those of a lane do not overlap.
        kinds: of memory, as "shards", "gathered", "activations".
        memory: seconds since the step began, and from then on the bytes of each of ``kinds``.
    """

    name: str
    spans: tuple[Span, ...]
    kinds: tuple[str, ...] = ()
    memory: tuple[tuple[float, tuple[int, ...]], ...] = ()
