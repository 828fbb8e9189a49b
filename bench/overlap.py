"""Reads a profiler's trace of a step on a GPU: which streams overlap, and when the host waits."""

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from bench import clock

Interval = tuple[float, float]

_STEP = "one step"
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_HOST = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a copy by the driver.

    Attributes:
        start, end: ms since the first kernel of the step started.
    """

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """The group that a kernel belongs to."""
        if "zero3::" in self.name:
            return "copies of zero3"
        is_nccl = self.name.startswith(("nccl", "Memcpy", "Memset"))
        return "NCCL, copies by the driver" if is_nccl else "others"


@dataclass(frozen=True)
class Trace:
    """The trace of one step.

    Attributes:
        streams: the kernels of each stream, in order, by the stream's number.
        waits: waits of the host for the device: the function, and start and end in ms.
    """

    streams: dict[int, list[Kernel]]
    waits: list[tuple[str, Interval]]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Returns the length of the intervals' union."""
    return sum(end - start for start, end in union(intervals))


def overlap(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Returns how long intervals of both overlap."""
    ours, theirs = union(some), union(others)
    total, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        start, end = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        total += max(end - start, 0)
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return total


def record(step: Callable, batches: list[torch.Tensor], path: str) -> None:
    """Writes a Chrome trace of the second of two steps; the first step warms the profiler up."""
    device = batches[0].device.type
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
    ) as profiler:
        for batch in batches:
            clock.wait(device)
            with record_function(_STEP):
                step(batch)
            clock.wait(device)
            profiler.step()


def read(path: Path) -> Trace:
    """Returns the step of a Chrome trace, gzipped or not."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not on_device:
        return Trace({}, [])
    origin = min(event["ts"] for event in on_device)

    def interval(event: dict) -> Interval:
        start = (event["ts"] - origin) / 1e3
        return start, start + event["dur"] / 1e3

    streams: dict[int, list[Kernel]] = {}
    for event in sorted(on_device, key=lambda event: event["ts"]):
        kernels = streams.setdefault(int(event["args"]["stream"]), [])
        kernels.append(Kernel(event["name"], *interval(event)))
    steps = [
        interval(event)
        for event in events
        if event["name"] == _STEP and event.get("cat") == "user_annotation"
    ]
    waits = [
        (event["name"], interval(event))
        for event in events
        if event.get("cat") in _ON_HOST
        and "Synchronize" in event["name"]
        and any(start <= interval(event)[0] <= end for start, end in steps)
    ]
    return Trace(dict(sorted(streams.items())), waits)


def summary(trace: Trace) -> dict | None:
    """Returns ms of the step, of each stream's work and of its overlap with the busiest stream.

    Returns None if nothing ran on a GPU.
    """
    if not trace.streams:
        return None
    intervals = {
        stream: [(kernel.start, kernel.end) for kernel in kernels]
        for stream, kernels in trace.streams.items()
    }
    busiest = max(intervals, key=lambda stream: length(intervals[stream]))
    kinds: Counter[str] = Counter()
    for kernels in trace.streams.values():
        for kernel in kernels:
            kinds[kernel.kind] += kernel.end - kernel.start
    return {
        "step": max(end for each in intervals.values() for _, end in each),
        "busiest": busiest,
        "streams": {
            stream: {
                "kernels": len(each),
                "busy": length(each),
                "beside": 0.0 if stream == busiest else overlap(each, intervals[busiest]),
            }
            for stream, each in intervals.items()
        },
        "kinds": dict(kinds),
        "waits": dict(Counter(name for name, _ in trace.waits)),
    }


def table(mode: str, found: dict) -> str:
    """Returns a Markdown table, a row for each stream, and a line on kinds of kernels and waits."""
    lines = [
        f"| {mode}: stream | kernels | busy, ms | of the step | beside stream {found['busiest']} |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for stream, each in found["streams"].items():
        share = each["beside"] / each["busy"] if each["busy"] else 0
        beside = "" if stream == found["busiest"] else f"{each['beside']:.2f} ms ({share:.0%})"
        lines.append(
            f"| {stream} | {each['kernels']} | {each['busy']:.2f} "
            f"| {each['busy'] / found['step']:.1%} | {beside} |"
        )
    kinds = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in sorted(found["kinds"].items()))
    waits = ", ".join(f"{name} {count}" for name, count in sorted(found["waits"].items()))
    return "\n".join(
        [
            *lines,
            "",
            f"A step of {found['step']:.1f} ms: {kinds}. The host waits: {waits or 'never'}.",
        ]
    )


def plot(trace: Trace, title: str, path: Path) -> None:
    """Draws a lane for each stream and a lane for the host's waits."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colors = {
        "others": "tab:blue",
        "copies of zero3": "tab:orange",
        "NCCL, copies by the driver": "tab:green",
        "the host waits": "tab:red",
    }
    lanes = {f"stream {stream}": kernels for stream, kernels in trace.streams.items()}
    figure = Figure(figsize=(24, 1.5 + 0.6 * (len(lanes) + 1)), layout="constrained")
    panel = figure.subplots()
    for y, kernels in enumerate(lanes.values()):
        panel.broken_barh(
            [(kernel.start, kernel.end - kernel.start) for kernel in kernels],
            (y - 0.4, 0.8),
            facecolors=[colors[kernel.kind] for kernel in kernels],
        )
    panel.broken_barh(
        [(start, end - start) for _, (start, end) in trace.waits],
        (len(lanes) - 0.4, 0.8),
        color=colors["the host waits"],
    )
    panel.set_yticks(range(len(lanes) + 1), [*lanes, "host"])
    panel.invert_yaxis()
    panel.set_xlabel("ms")
    panel.set_title(title)
    patches = [Patch(color=color, label=kind) for kind, color in colors.items()]
    figure.legend(handles=patches, ncols=len(patches), loc="outside lower center")
    figure.savefig(path, dpi=100)
