"""The memory that ranks may still take."""

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepcompile_zero3.transport.json_collectives import all_gather_json
from deepcompile_zero3.transport.on_all_ranks import on_all_ranks

_PART = 0.9  # part of the free memory that may be taken


def free_bytes(device: torch.device, group: dist.ProcessGroup) -> float:
    """Returns the bytes that each rank of ``group`` may take beyond its peak so far. Collective.

    On a CPU these are what the system or a control group has left, in equal parts for the ranks
    of a host; on a GPU, what the device has left beyond what torch's allocator holds.

    Raises:
        Zero3Error: a rank cannot tell.
    """
    what = "MeasuredSchedule"
    if device.type != "cpu":
        left = on_all_ranks(what, lambda: torch.cuda.mem_get_info(device)[0], group)
        return _PART * min(all_gather_json(what, left, group))
    numbers: Any = on_all_ranks(what, lambda: [_left(), _peak_beyond_now()], group)
    told = all_gather_json(what, [socket.gethostname(), *numbers], group)
    hosts = [host for host, *_ in told]
    of_ranks = (left / hosts.count(host) - beyond for host, left, beyond in told)
    return max(_PART * min(of_ranks), 0.0)


def _left() -> float:
    return min([_fields("/proc/meminfo")["MemAvailable"], *_left_in_control_groups()])


def _peak_beyond_now() -> float:
    fields = _fields("/proc/self/status")
    return fields["VmHWM"] - fields["VmRSS"]


def _fields(path: str) -> dict[str, float]:
    """Returns the fields in kB of a file of /proc, in bytes."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {line[0][:-1]: float(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}


def _left_in_control_groups() -> list[float]:
    """Returns what each control group of this process, of version 1 or 2, has left."""
    left = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            found = _left_in(folder, bool(controllers)) if folder.is_relative_to(root) else None
            if found is not None:
                left.append(found)
    return left


def _left_in(folder: Path, version1: bool) -> float | None:
    """Returns what a control group has left, with the page cache that the kernel would drop."""
    if version1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    else:
        names = ("memory.max", "memory.current", "inactive_file")
    limit, usage, cached = names
    try:
        most = (folder / limit).read_text().strip()
        used = float((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:  # not mounted here, or the root, which has no limit
        return None
    if most == "max":
        return None
    return float(most) - used + sum(float(x.split()[1]) for x in lines if x.split()[0] == cached)
