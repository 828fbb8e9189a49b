"""Turns the profile of a step into a timeline.

The runtime marks its work with ranges such as
``zero3::all_gather start [Float, 4096 bytes] a.weight, b.weight``. The collective is in flight from
the beginning of this range to the end of the corresponding ``wait`` range. A ``send`` range marks
when gradients of a reduction were sent; some are sent before the reduction starts.
"""

import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from deepcompile_zero3.tools.timeline import Span, Timeline

_OURS = re.compile(r"zero3::(\w+) (start|send|wait) (?:\[\w+, (\d+) bytes\] )?(.*)", re.DOTALL)
_LANES = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}

# Operators that compute the gradient that they send.
_COMPUTE_INSIDE = ("zero3::reduce_mm", "zero3::reduce_rows")
# Ranges of the autograd engine, and operators that start or await collectives of others.
_NO_COMPUTATION = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::")
_INDUCTOR_KERNEL = re.compile(r"graph_\d+_\w+|cpp_\w+")
_OTHERS_WAIT = "_c10d_functional::wait_tensor"


@dataclass(frozen=True)
class Event:
    """An event of a profile.

    Attributes:
        kind: "operator" or "range" on the host, "kernel" on a GPU, or "memory".
        start, end: times in seconds.
        thread: the host thread; for a kernel, the thread that launched it.
        launched: for a kernel, the time of its launch in seconds.
        nbytes: for memory, the bytes that are allocated from ``start`` on.
    """

    kind: str
    name: str
    start: float
    end: float
    thread: int = 0
    launched: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True)
class _Ours:
    """A range of the runtime."""

    op: str
    phase: str
    parameters: tuple[str, ...]
    nbytes: int
    event: Event


def timeline_of(events: Iterable[Event], step: Event) -> Timeline:
    """Returns the timeline of ``step``, named "measured".

    On CPUs a collective lasts to the end of its wait, which may be long after its last byte has
    arrived. If the profile has kernels of a GPU, the kernels compute and send, and the rank waits
    while only sending kernels run.

    On CPUs memory is the number of bytes allocated beyond the step's minimum; on a GPU it is the
    number of bytes allocated.

    Args:
        events: events of the profile, in any order.
        step: the range of the step, on the thread that computes.
    """
    inside = [event for event in events if step.start <= event.start < step.end]
    inside.sort(key=lambda event: (event.start, -event.end))
    ours = [found for event in inside if (found := _ours(event)) is not None]
    kernels = [event for event in inside if event.kind == "kernel"]
    if kernels:
        lanes = _lanes_of_kernels(kernels, ours)
    else:
        waits = _in_turn(span for event in inside if (span := _wait(event)) is not None)
        host = [event for event in inside if event.thread == step.thread]
        computation = _computation(host, [span.start for span in waits])
        lanes = [_in_turn(computation), _in_turn(_transfers(ours, step)), waits]
    spans = tuple(_since(span, step.start) for lane in lanes for span in lane)
    memory = tuple(_memory(inside, step, is_absolute=bool(kernels)))
    return Timeline("measured", spans, ("allocated",) if memory else (), memory)


def collectives_of(events: Iterable[Event], step: Event) -> dict[str, tuple[int, int]]:
    """Returns the number of collectives that start in ``step`` and their full bytes, by kind."""
    found: dict[str, tuple[int, int]] = {}
    inside = (event for event in events if step.start <= event.start < step.end)
    for ours in filter(None, map(_ours, inside)):
        if ours.op in _LANES and ours.phase == "start":
            number, nbytes = found.get(ours.op, (0, 0))
            found[ours.op] = number + 1, nbytes + ours.nbytes
    return found


def _ours(event: Event) -> _Ours | None:
    found = _OURS.fullmatch(event.name) if event.kind == "range" else None
    if found is None:
        return None
    op, phase, nbytes, names = found.groups()
    return _Ours(op, phase, tuple(names.split(", ")), int(nbytes or 0), event)


# ---- on the host


def _computation(events: Sequence[Event], waits: Sequence[float]) -> Iterator[Span]:
    """Yields the outermost operators that compute and do not wait.

    Args:
        events: events of one thread, in order.
        waits: times at which waits begin, in order.
    """
    busy_until = 0.0
    for event in events:
        if event.start < busy_until:
            continue
        waits_inside = bisect_left(waits, event.end) > bisect_left(waits, event.start)
        if _computes(event) and not waits_inside:
            yield Span("compute", event.name, event.start, event.end)
        elif not _ends_the_search(event):
            continue
        busy_until = event.end


def _computes(event: Event) -> bool:
    if event.kind != "operator":
        return False
    if "::" not in event.name:  # an operator of autograd, or a part of the compiler
        return _INDUCTOR_KERNEL.fullmatch(event.name) is not None
    return not event.name.startswith((*_NO_COMPUTATION, "zero3::"))


def _ends_the_search(event: Event) -> bool:
    """Returns whether nothing inside an event counts as computation."""
    if event.kind == "range":
        ours = _ours(event)
        return ours is not None and ours.phase != "send"
    return event.name.startswith("zero3::") and event.name not in _COMPUTE_INSIDE


def _transfers(ours: Sequence[_Ours], step: Event) -> Iterator[Span]:
    """Yields a span from the start of each gather and reduction to the end of its wait."""
    sent: dict[str, float] = {}  # by parameter, when its gradient was sent
    starts: dict[tuple[str, tuple[str, ...]], deque[float]] = defaultdict(deque)
    for each in (each for each in ours if each.op in _LANES):
        same = starts[each.op, each.parameters]
        if each.phase == "send":
            for name in each.parameters:
                sent.setdefault(name, each.event.start)
        elif each.phase == "start":
            start = each.event.start
            if each.op == "reduce_scatter":
                start = min(sent.pop(name, start) for name in each.parameters)
            same.append(start)
        else:
            for name in each.parameters:  # sent after the start
                sent.pop(name, None)
            yield _span(each, same.popleft() if same else step.start, each.event.end)
    for (op, parameters), same in starts.items():
        for start in same:  # of collectives that are awaited after the step
            yield Span(_LANES[op], op, start, step.end, parameters)


def _wait(event: Event) -> Span | None:
    if event.name == _OTHERS_WAIT:
        return Span("waiting", "others", event.start, event.end)
    ours = _ours(event)
    if ours is None or ours.phase != "wait":
        return None
    return replace(_span(ours, event.start, event.end), lane="waiting")


def _span(ours: _Ours, start: float, end: float) -> Span:
    return Span(_LANES.get(ours.op, "waiting"), ours.op, start, end, ours.parameters, ours.nbytes)


# ---- on a GPU


def _lanes_of_kernels(kernels: Sequence[Event], ours: Sequence[_Ours]) -> list[list[Span]]:
    computation = []
    sending: dict[_Ours, list[Event]] = defaultdict(list)
    for kernel in kernels:
        owner = _owner(kernel, ours)
        is_sent = kernel.name.startswith("nccl")
        if owner is None and not is_sent:
            computation.append(Span("compute", kernel.name, kernel.start, kernel.end))
        elif owner is not None and is_sent:
            sending[owner].append(kernel)
    computation = _in_turn(computation)
    transfers = [
        _span(owner, group[0].start, max(kernel.end for kernel in group))
        for owner, group in sending.items()
        if owner.op in _LANES
    ]
    waits = [wait for span in transfers for wait in _outside(span, computation)]
    return [computation, _in_turn(transfers), _in_turn(waits)]


def _owner(kernel: Event, ours: Sequence[_Ours]) -> _Ours | None:
    """Returns the innermost range of the runtime that launched a kernel."""
    around = [
        each
        for each in ours
        if each.event.thread == kernel.thread
        and each.event.start <= kernel.launched <= each.event.end
    ]
    return min(around, key=lambda each: each.event.end - each.event.start, default=None)


def _outside(span: Span, others: Sequence[Span]) -> Iterator[Span]:
    """Yields the parts of ``span`` that are outside ``others``, which do not overlap."""
    start = span.start
    for other in others:
        if other.end <= start:
            continue
        if other.start >= span.end:
            break
        if other.start > start:
            yield replace(span, lane="waiting", start=start, end=other.start)
        start = other.end
    if start < span.end:
        yield replace(span, lane="waiting", start=start)


# ---- both


def _in_turn(spans: Iterable[Span]) -> list[Span]:
    """Cuts spans that overlap in a lane: none starts before the previous one has ended."""
    ends: dict[str, float] = {}
    result = []
    for span in sorted(spans, key=lambda span: span.end):
        start = max(span.start, ends.get(span.lane, span.start))
        ends[span.lane] = span.end
        result.append(replace(span, start=start))
    return result


def _since(span: Span, start: float) -> Span:
    return replace(span, start=span.start - start, end=span.end - start)


def _memory(
    events: Sequence[Event], step: Event, is_absolute: bool
) -> Iterator[tuple[float, tuple[int, ...]]]:
    samples = [event for event in events if event.kind == "memory"]
    least = 0 if is_absolute else min((sample.nbytes for sample in samples), default=0)
    for sample in samples:
        yield sample.start - step.start, (sample.nbytes - least,)
