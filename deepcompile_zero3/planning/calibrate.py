"""The numbers of the machine at hand, as a plan takes them."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from deepcompile_zero3.fully_shard import fully_shard
from deepcompile_zero3.module import all_parameters_of
from deepcompile_zero3.parameter import AllGather
from deepcompile_zero3.planning.machine import Link, Machine

_SMALL, _LARGE = 1 << 20, 64 << 20  # bytes of a gather
_SIDE = 1024  # of a matrix


def measure_machine(mesh: DeviceMesh, name: str = "here") -> Machine:
    """What the ranks of a mesh reach, all of them at once. Collective; takes some seconds.

    Args:
        mesh: of one dimension, on one host: links between hosts are taken for those within.
        name: of the machine.

    Returns:
        The same on all ranks: of the slowest.
    """
    device = torch.device(mesh.device_type)
    group = mesh.get_group()
    ranks = mesh.size()
    flops = {dtype: _flops(dtype, device) for dtype in (torch.float32, torch.bfloat16)}
    bandwidth = _bandwidth(device)
    launch = _launch(device)
    small, large = (_Gathered(nbytes, mesh) for nbytes in (_SMALL, _LARGE))
    quick, slow = _seconds(small.gather, device), _seconds(large.gather, device)
    both = _seconds(lambda: large.gather(beside=True), device)
    alone = _seconds(large.compute, device)
    received = (ranks - 1) / ranks
    # What is copied on both sides is no matter of the link.
    copied = 2 / ranks / bandwidth
    rate = max((slow - quick) / (_LARGE - _SMALL) - copied, 1e-15)
    latency = max(quick - launch - _SMALL * (rate + copied), 0.0)
    hidden = (alone + slow - both) / slow
    numbers = torch.tensor(
        [
            1 / flops[torch.float32],
            1 / flops[torch.bfloat16],
            1 / bandwidth,
            1 / _update_bandwidth(device),
            launch,
            rate,
            latency,
            -min(max(hidden, 0.0), 1.0),
        ],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
    fp32, bf16, copying, updating, launch, rate, latency, hidden = numbers.tolist()
    link = Link(latency / max(ranks - 1, 1), received / rate if ranks > 1 else float("inf"))
    return Machine(
        name=name,
        flops={torch.float32: 1 / fp32, torch.bfloat16: 1 / bf16},
        bandwidth=1 / copying,
        update_bandwidth=1 / updating,
        launch=launch,
        memory=float("inf"),
        ranks_per_host=ranks,
        local=link,
        remote=link,
        overlap=-hidden,
        backend=dist.get_backend(group),
        source="measured",
    )


class _Gathered:
    """One that is gathered, and a product of matrices that takes about as long."""

    def __init__(self, nbytes: int, mesh: DeviceMesh) -> None:
        rows = mesh.size()
        self._module = nn.Linear(nbytes // 4 // rows, rows, bias=False, device=mesh.device_type)
        fully_shard(self._module, mesh=mesh, transport="c10d")
        self._parameters = all_parameters_of(self._module, "measure_machine")
        self._left = torch.full((_SIDE, _SIDE), 0.5, device=mesh.device_type)

    def gather(self, beside: bool = False) -> None:
        running = AllGather(self._parameters)
        if beside:
            self.compute()
        running.wait()

    def compute(self) -> None:
        for _ in range(4):
            self._left @ self._left


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    """The median of some calls, of which the first do not count."""
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
    parameter = nn.Parameter(torch.zeros(_LARGE // 4, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return 7 * _LARGE / _seconds(optimizer.step, device)


def _launch(device: torch.device) -> float:
    few = torch.zeros(16, device=device)
    return _seconds(lambda: [few.add_(1) for _ in range(100)], device) / 100
