"""Reads the events of a torch profile in Chrome's trace format."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deepcompile_zero3.tools.tracing.measured import Event

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


def events_of(trace: Mapping[str, Any]) -> list[Event]:
    """Returns the events that a timeline is made of.

    Args:
        trace: a trace that ``torch.profiler.profile.export_chrome_trace`` has written.
    """
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
        if kind == "kernel":
            launch = launches.get(record["args"].get("correlation"), record)
            launched = launch["ts"] * 1e-6
            events.append(Event(kind, record["name"], start, end, launch["tid"], launched))
        else:
            events.append(Event(kind, record["name"], start, end, record["tid"]))
    return events + list(_memory(records))


def steps_of(events: Iterable[Event]) -> list[Event]:
    """Returns the ranges of ``torch.profiler.profile.step``, in order."""
    steps = [event for event in events if event.kind == "range" and event.name.startswith(_STEP)]
    return sorted(steps, key=lambda step: step.start)


def _memory(records: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """Yields memory events of the GPU if it allocates, else of the host."""
    samples = [record for record in records if record.get("name") == "[memory]"]
    types = {sample["args"]["Device Type"] for sample in samples}
    wanted = _CUDA if _CUDA in types else _CPU
    for sample in samples:
        if sample["args"]["Device Type"] == wanted:
            time = sample["ts"] * 1e-6
            nbytes = sample["args"]["Total Allocated"]
            yield Event("memory", "allocated", time, time, sample["tid"], nbytes=nbytes)
