"""Turns torch's profile of a step into a timeline.

The runtime marks its work with ranges such as
``zero3::all_gather start [Float, 4096 bytes] a.weight, b.weight``. The collective is in flight from
the beginning of this range to the end of the corresponding ``wait`` range. A ``send`` range marks
when gradients of a reduction were sent; some are sent before the reduction starts.
"""

import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepcompile_zero3.tools.timeline import Span, Timeline

_KINDS = {
    "cpu_op": "operator",
    "user_annotation": "range",
    "kernel": "kernel",
    "gpu_memcpy": "kernel",
    "gpu_memset": "kernel",
}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_CPU, _CUDA = 0, 1  # torch's device types
_STEP = "ProfilerStep#"

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
    """An event of a profile, in seconds."""

    kind: str  # "operator" or "range" on the host, "kernel" on a GPU, or "memory"
    name: str
    start: float
    end: float
    thread: int = 0  # thread of the host; the one that launched a kernel
    launched: float = 0.0  # the time of a kernel's launch
    nbytes: int = 0  # what is allocated from ``start`` on, for memory

    @property
    def seconds(self) -> float:
        """The duration of the event."""
        return self.end - self.start


@dataclass(frozen=True)
class _Range:
    """A range of the runtime: its span has the lane of its collective, or else "waiting"."""

    phase: str
    span: Span
    thread: int


# ---- Chrome's trace format


def events_of(trace: Mapping[str, Any]) -> list[Event]:
    """Returns the events of a trace that torch's ``export_chrome_trace`` has written."""
    records = trace["traceEvents"]
    launches = {
        record["args"]["correlation"]: record
        for record in records
        if record.get("cat") in _LAUNCHES and "correlation" in record.get("args", {})
    }
    events = []
    for record in records:
        kind = _KINDS.get(record.get("cat", ""))
        if kind is None:
            continue
        start = record["ts"] * 1e-6
        end = start + record.get("dur", 0) * 1e-6
        thread, launched = record["tid"], 0.0
        if kind == "kernel":
            launch = launches.get(record["args"].get("correlation"), record)
            thread, launched = launch["tid"], launch["ts"] * 1e-6
        events.append(Event(kind, record["name"], start, end, thread, launched))
    samples = [record for record in records if record.get("name") == "[memory]"]
    types = {sample["args"]["Device Type"] for sample in samples}
    for sample in samples:  # samples of the GPU if it allocates, else of the host
        if sample["args"]["Device Type"] == (_CUDA if _CUDA in types else _CPU):
            time, nbytes = sample["ts"] * 1e-6, sample["args"]["Total Allocated"]
            events.append(Event("memory", "allocated", time, time, sample["tid"], nbytes=nbytes))
    return events


def steps_of(events: Iterable[Event]) -> list[Event]:
    """Returns the ranges of ``torch.profiler.profile.step``, in order."""
    steps = [event for event in events if event.kind == "range" and event.name.startswith(_STEP)]
    return sorted(steps, key=lambda step: step.start)


# ---- a step


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
    inside = _inside(events, step)
    ranges = [found for event in inside if (found := _range(event))]
    kernels = [event for event in inside if event.kind == "kernel"]
    lanes = _of_kernels(kernels, ranges) if kernels else _of_host(inside, ranges, step)
    spans = tuple(
        replace(span, start=span.start - step.start, end=span.end - step.start)
        for lane in lanes
        for span in _in_turn(lane)
    )
    samples = [event for event in inside if event.kind == "memory"]
    least = 0 if kernels else min((sample.nbytes for sample in samples), default=0)
    memory = tuple((sample.start - step.start, (sample.nbytes - least,)) for sample in samples)
    return Timeline("measured", spans, ("allocated",) if memory else (), memory)


def collectives_of(events: Iterable[Event], step: Event) -> dict[str, tuple[int, int]]:
    """Returns the number of collectives that start in ``step`` and their full bytes, by kind."""
    found: dict[str, tuple[int, int]] = {}
    for each in filter(None, map(_range, _inside(events, step))):
        if each.phase == "start" and each.span.name in _LANES:
            number, nbytes = found.get(each.span.name, (0, 0))
            found[each.span.name] = number + 1, nbytes + each.span.nbytes
    return found


def _inside(events: Iterable[Event], step: Event) -> list[Event]:
    """Returns the events that begin in a step, outer ones before those inside of them."""
    inside = [event for event in events if step.start <= event.start < step.end]
    return sorted(inside, key=lambda event: (event.start, -event.end))


def _range(event: Event) -> _Range | None:
    found = _OURS.fullmatch(event.name) if event.kind == "range" else None
    if found is None:
        return None
    op, phase, nbytes, names = found.groups()
    lane, parameters = _LANES.get(op, "waiting"), tuple(names.split(", "))
    span = Span(lane, op, event.start, event.end, parameters, int(nbytes or 0))
    return _Range(phase, span, event.thread)


def _in_turn(spans: Iterable[Span]) -> Iterator[Span]:
    """Cuts overlapping spans of a lane: none starts before the previous one has ended."""
    end = float("-inf")
    for span in sorted(spans, key=lambda span: span.end):
        yield replace(span, start=max(span.start, end))
        end = span.end


# ---- on the host


def _of_host(
    inside: Sequence[Event], ranges: Sequence[_Range], step: Event
) -> list[Iterable[Span]]:
    waits = [replace(each.span, lane="waiting") for each in ranges if each.phase == "wait"]
    waits += [
        Span("waiting", "others", event.start, event.end)
        for event in inside
        if event.name == _OTHERS_WAIT
    ]
    on_thread = [event for event in inside if event.thread == step.thread]
    computation = _computation(on_thread, sorted(span.start for span in waits))
    return [computation, _transfers(ranges, step), waits]


def _computation(events: Sequence[Event], waits: Sequence[float]) -> Iterator[Span]:
    """Yields the outermost operators of a thread that compute and do not wait, given the times at
    which waits begin; both are in order.
    """
    busy_until = 0.0
    for event in events:
        if event.start < busy_until:
            continue
        computes = _computes(event)
        if computes and bisect_left(waits, event.end) > bisect_left(waits, event.start):
            computes = None  # something inside it waits
        if computes:
            yield Span("compute", event.name, event.start, event.end)
        if computes is not None:
            busy_until = event.end


def _computes(event: Event) -> bool | None:
    """Returns True if all of an event is computation, False if nothing, None if parts may be."""
    if event.kind != "operator":
        ours = _range(event)
        return False if ours and ours.phase != "send" else None
    if event.name.startswith("zero3::"):
        return None if event.name in _COMPUTE_INSIDE else False
    if "::" in event.name:
        return None if event.name.startswith(_NO_COMPUTATION) else True
    # Other operators without a namespace are those of autograd, or parts of the compiler.
    return True if _INDUCTOR_KERNEL.fullmatch(event.name) else None


def _transfers(ranges: Sequence[_Range], step: Event) -> Iterator[Span]:
    """Yields a span from the start of each gather and reduction to the end of its wait."""
    sent: dict[str, float] = {}  # by parameter, when its gradient was sent
    starts: dict[tuple[str, tuple[str, ...]], deque[Span]] = defaultdict(deque)
    for phase, span in ((each.phase, each.span) for each in ranges if each.span.name in _LANES):
        same = starts[span.name, span.parameters]
        if phase == "send":
            for name in span.parameters:
                sent.setdefault(name, span.start)
        elif phase == "start":
            if span.name == "reduce_scatter":
                first = min(sent.pop(name, span.start) for name in span.parameters)
                span = replace(span, start=first)
            same.append(span)
        else:
            for name in span.parameters:  # sent after the start
                sent.pop(name, None)
            yield replace(span, start=same.popleft().start if same else step.start)
    for same in starts.values():
        for span in same:  # spans of collectives that are awaited after the step
            yield replace(span, end=step.end)


# ---- on a GPU


def _of_kernels(kernels: Sequence[Event], ranges: Sequence[_Range]) -> list[Iterable[Span]]:
    computation = []
    sending: dict[_Range, list[Event]] = defaultdict(list)
    for kernel in kernels:
        owner = _owner(kernel, ranges)
        is_sent = kernel.name.startswith("nccl")
        if owner is None and not is_sent:
            computation.append(Span("compute", kernel.name, kernel.start, kernel.end))
        elif owner is not None and is_sent and owner.span.name in _LANES:
            sending[owner].append(kernel)
    computation = list(_in_turn(computation))
    transfers = [
        replace(owner.span, start=group[0].start, end=max(kernel.end for kernel in group))
        for owner, group in sending.items()
    ]
    waits = [wait for span in transfers for wait in _outside(span, computation)]
    return [computation, transfers, waits]


def _owner(kernel: Event, ranges: Sequence[_Range]) -> _Range | None:
    """Returns the innermost range of the runtime that launched a kernel."""
    around = [
        each
        for each in ranges
        if each.thread == kernel.thread and each.span.start <= kernel.launched <= each.span.end
    ]
    return min(around, key=lambda each: each.span.seconds, default=None)


def _outside(span: Span, others: Sequence[Span]) -> Iterator[Span]:
    """Yields the parts of ``span`` that are outside ``others``, which do not overlap."""
    start = span.start
    for other in others:
        if start >= span.end:
            return
        if start < other.start:
            end = min(other.start, span.end)
            yield replace(span, lane="waiting", start=start, end=end)
        start = max(start, other.end)
    if start < span.end:
        yield replace(span, lane="waiting", start=start)
