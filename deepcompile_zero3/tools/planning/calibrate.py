"""Measures this machine, for plans."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw

from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.all_gather import AllGather
from deepcompile_zero3.sharding.fully_shard import fully_shard
from deepcompile_zero3.sharding.registered import all_parameters_of
from deepcompile_zero3.tools.planning.machine import Link, Machine
from deepcompile_zero3.transport.json_collectives import all_gather_json

_SMALL, _LARGE = 1 << 20, 64 << 20  # bytes of a gather
_SIDE = 1024  # rows and columns of a matrix


def measure_machine(mesh: DeviceMesh, name: str = "here") -> Machine:
    """Measures the machine of a mesh, on all ranks at once. Collective; takes some seconds.

    Args:
        mesh: a mesh of one dimension, on one host: ``remote`` is a copy of the measured ``local``.
        name: the name of the machine.

    Returns:
        The machine with the numbers of the slowest rank, the same on all ranks.
    """
    return measure_links(mesh, measure_device(torch.device(mesh.device_type), name))


def measure_device(device: torch.device, name: str) -> Machine:
    """Measures this rank alone: the links of the machine take no time."""
    alone = Link(0.0, float("inf"))
    return Machine(
        name=name,
        flops={dtype: _flops(dtype, device) for dtype in (torch.float32, torch.bfloat16)},
        bandwidth=_bandwidth(device),
        update_bandwidth=_update_bandwidth(device),
        launch=_launch(device),
        memory=float("inf"),
        ranks_per_host=1,
        local=alone,
        remote=alone,
        source="measured",
    )


def measure_links(mesh: DeviceMesh, mine: Machine) -> Machine:
    """Returns the machine of all ranks of a mesh; this rank has measured ``mine``. Collective."""
    device = torch.device(mesh.device_type)
    group = mesh.get_group()
    ranks = mesh.size()
    small, large = (_Gathered(nbytes, mesh) for nbytes in (_SMALL, _LARGE))
    quick, slow = _seconds(small.gather, device), _seconds(large.gather, device)
    both = _seconds(lambda: large.gather(beside=True), device)
    alone = _seconds(large.compute, device)
    received = (ranks - 1) / ranks
    # Copies at both ends of the link do not count as its time.
    copied = 2 / ranks / mine.bandwidth
    rate = max((slow - quick) / (_LARGE - _SMALL) - copied, 1e-15)
    latency = max(quick - mine.launch - _SMALL * (rate + copied), 0.0)
    costs = {
        "fp32": 1 / mine.flops[torch.float32],
        "bf16": 1 / mine.flops[torch.bfloat16],
        "copy": 1 / mine.bandwidth,
        "update": 1 / mine.update_bandwidth,
        "launch": mine.launch,
        "rate": rate,
        "latency": latency,
        "not hidden": 1 - min(max((alone + slow - both) / slow, 0.0), 1.0),
    }
    told = all_gather_json("measure_links", costs, group)
    worst = {what: max(theirs[what] for theirs in told) for what in costs}
    bandwidth = received / worst["rate"] if ranks > 1 else float("inf")
    link = Link(worst["latency"] / max(ranks - 1, 1), bandwidth)
    return replace(
        mine,
        flops={torch.float32: 1 / worst["fp32"], torch.bfloat16: 1 / worst["bf16"]},
        bandwidth=1 / worst["copy"],
        update_bandwidth=1 / worst["update"],
        launch=worst["launch"],
        ranks_per_host=ranks,
        local=link,
        remote=link,
        overlap=1 - worst["not hidden"],
        backend=_C.backend_name(group.group_name, device),
    )


class _Gathered:
    """A parameter to gather, and matrix products that take about as long."""

    def __init__(self, nbytes: int, mesh: DeviceMesh) -> None:
        rows = mesh.size()
        columns = nbytes // 4 // rows
        device, dtype = torch.device(mesh.device_type), torch.float32
        self._module = nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)
        fully_shard(self._module, mesh=mesh, transport="c10d")
        self._parameters = all_parameters_of(self._module, "measure_machine")
        self._left = torch.full((_SIDE, _SIDE), 0.5, device=device, dtype=dtype)

    def gather(self, beside: bool = False) -> None:
        running = AllGather(self._parameters)
        if beside:
            self.compute()
        running.wait()

    def compute(self) -> None:
        for _ in range(4):
            self._left @ self._left


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """Returns the median seconds of a call; the first two of twelve calls are not counted."""
    took = []
    for _ in range(12):
        start = time.perf_counter()
        function()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        took.append(time.perf_counter() - start)
    return statistics.median(took[2:])


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.full((_SIDE, _SIDE), 0.5, dtype=dtype, device=device)
    return 2 * _SIDE**3 / _seconds(lambda: matrix @ matrix, device)


def _bandwidth(device: torch.device) -> float:
    source = torch.zeros(_LARGE, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _LARGE / _seconds(lambda: target.copy_(source), device)


def _update_bandwidth(device: torch.device) -> float:
    """Measures AdamW without an optimizer, since the user's hooks see the steps of optimizers."""
    zeros = torch.zeros(4, _LARGE // 4, dtype=torch.float32, device=device)
    parameter, gradient, first, second = zeros.unbind()
    step = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def update() -> None:
        adamw(
            [parameter],
            [gradient],
            [first],
            [second],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-3,
            weight_decay=0.01,
            eps=1e-8,
            maximize=False,
        )

    return 7 * _LARGE / _seconds(update, device)


def _launch(device: torch.device) -> float:
    few = torch.zeros(16, dtype=torch.float32, device=device)
    return _seconds(lambda: [few.add_(1) for _ in range(100)], device) / 100
