"""What a profiled step tells of the machine, and the memory that it left free."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepcompile_zero3.tools.tracing.profile import Event, timeline_of
from deepcompile_zero3.torch_internals import compiler
from deepcompile_zero3.transport.json_collectives import all_gather_json

_BACKWARD = "CompiledFunctionBackward"  # the autograd function of a compiled graph
_PART = 0.9  # of the free memory that may be taken


class MeasuredStep(NamedTuple):
    """A measured step, in seconds, with each graph run once."""

    whole: float  # the step, with all its forwards
    forward: float  # of kernels in compiled forwards
    backward: float  # of kernels in compiled backwards
    waiting: float  # for gathers and reductions

    def agreed(self, group: dist.ProcessGroup) -> "MeasuredStep":
        """Returns the step of the slowest rank, which is the one that waits least. Collective."""
        steps = [MeasuredStep(*each) for each in all_gather_json("MeasuredSchedule", self, group)]
        whole, forward, backward, _ = map(max, zip(*steps, strict=True))
        return MeasuredStep(whole, forward, backward, min(each.waiting for each in steps))


def measured_step(events: Sequence[Event], step: Event, times: int) -> MeasuredStep:
    """Returns what a profile tells of ``step``, in which each graph ran so many times."""
    timeline = timeline_of(events, step)
    inside = [event for event in events if step.start <= event.start < step.end]
    forwards = [event for event in inside if event.name.startswith(compiler.REGION)]
    backwards = [event for event in inside if event.name == _BACKWARD]

    def computing(ranges: Sequence[Event]) -> float:
        return sum(
            span.seconds
            for span in timeline.of("compute")
            if any(r.start <= span.start + step.start < r.end for r in ranges)
        )

    of_each = computing(forwards), computing(backwards), timeline.seconds("waiting")
    return MeasuredStep(step.seconds, *(seconds / times for seconds in of_each))


# ---- memory


def free_bytes(device: torch.device, group: dist.ProcessGroup) -> float:
    """Returns the bytes that each rank of ``group`` may take beyond its peak so far. Collective.

    On a CPU these are what the system, or a control group, has left, in equal parts for the ranks
    of a host.
    """
    free = _left_on_cpu() if device.type == "cpu" else _left_on_gpu(device)
    told: Any = all_gather_json("MeasuredSchedule", [socket.gethostname(), free], group)
    if device.type != "cpu":
        return _PART * min(free for _, free in told)
    hosts = [host for host, _ in told]
    beyond = _peak_beyond_now()
    mine = [free / hosts.count(host) for host, free in told]
    told = all_gather_json("MeasuredSchedule", beyond, group)
    return _PART * min(free - beyond for free, beyond in zip(mine, told, strict=True))


def _left_on_gpu(device: torch.device) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def _left_on_cpu() -> float:
    left = _fields("/proc/meminfo")["MemAvailable"]
    return min([left, *_left_in_control_groups()])


def _peak_beyond_now() -> float:
    fields = _fields("/proc/self/status")
    return fields["VmHWM"] - fields["VmRSS"]


def _fields(path: str) -> dict[str, float]:
    """Returns the fields in kB of a file of /proc, in bytes."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {line[0][:-1]: float(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}


def _left_in_control_groups() -> list[float]:
    """Returns what the control groups of this process, of version 1 or 2, have left."""
    left = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version1 = "memory" in controllers.split(",")
        if controllers and not version1:
            continue
        root = "/sys/fs/cgroup/memory" if version1 else "/sys/fs/cgroup"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, usage = names if version1 else ("memory.max", "memory.current")
        for folder in (Path(f"{root}{path}"), Path(root)):
            try:
                most = (folder / limit).read_text().strip()
                used = (folder / usage).read_text()
            except OSError:  # not mounted, or the root, which has no limit
                continue
            if most != "max":
                left.append(float(most) - float(used))
    return left
