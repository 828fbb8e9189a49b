"""Compares predicted steps with measured steps."""

import argparse
import ctypes
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.command_line import add_workloads, console, print_table
from bench.ranks import Ranks, Training, join
from bench.workloads import WORKLOADS, Workload
from deepcompile_zero3 import limit_buffers
from deepcompile_zero3.options import Options
from deepcompile_zero3.tools.planning.graphs import fake_ranks, shard_blocks, trace
from deepcompile_zero3.tools.planning.kernels import kernels_of
from deepcompile_zero3.tools.planning.machine import Machine
from deepcompile_zero3.tools.planning.measure import measure_kernels, measure_machine
from deepcompile_zero3.tools.planning.plan import plan
from deepcompile_zero3.tools.planning.predicted import Plan

MODE = "zero3-c10d"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt

HEAD = (
    "| workload | ranks | step, ms | predicted | off | collectives | peak, MB | predicted | off |\n"
    "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |"
)


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_workloads(part)
    part.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    part.add_argument("--rounds", type=int, default=6, help="predictions (default: 6)")
    part.add_argument("--steps", type=int, default=3, help="of each round (default: 3)")


def run(args: argparse.Namespace) -> None:
    """Compares measured steps with steps that are predicted from the ranks' measurements."""
    lines = [HEAD]
    for ranks in args.ranks:
        for workload in args.workloads:
            with console.status(f"{workload} on {ranks}"):
                found = compare(workload, ranks, args.rounds, args.steps)
            lines.append(found.row(workload, ranks))
            console.print(lines[-1])
    print_table(lines)


class Kernels:
    """A rank that measures the kernels and the machine for a plan of a workload."""

    def __init__(self, workload: str, rank: int, world_size: int, store: str) -> None:
        shape = WORKLOADS[workload]
        with fake_ranks(world_size) as mesh:
            with torch.device("meta"):
                model = shape.build()
            _shard(shape, model, mesh)
            graphs = trace(model, _call(shape)).rewrite(Options())
        self._kernels = [
            kernel
            for captured in (*graphs.forward, *graphs.backward)
            for kernel in kernels_of(captured.graph_module.graph)
        ]
        join(rank, world_size, store)
        self._mesh = init_device_mesh("cpu", (world_size,))

    def measure(self) -> tuple[dict[str, float], Machine]:
        """Returns seconds of each kernel, measured on all ranks at once, and the machine."""
        return measure_kernels(self._kernels, between=dist.barrier), measure_machine(self._mesh)


class Frugal(Training):
    """A rank that returns freed memory to the system at once, which makes steps slower."""

    def __init__(self, *args: Any) -> None:
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            if not libc.mallopt(option, 64 << 10):
                raise RuntimeError("this malloc cannot be told to keep nothing")
        limit_buffers(0)
        super().__init__(*args)


@dataclass(frozen=True)
class Compared:
    """A workload on a number of ranks. Times are medians over the rounds.

    Attributes:
        seconds, predicted: seconds of a step, measured and predicted.
        off: predicted over measured seconds of the same round, minus 1.
        collectives, planned: the number of collectives and their bytes, by kind.
        peak, predicted_peak: bytes of a process.
    """

    seconds: float
    predicted: float
    off: float
    collectives: dict[str, tuple[int, int]]
    planned: dict[str, tuple[int, int]]
    peak: float
    predicted_peak: float

    def row(self, workload: str, ranks: int) -> str:
        """Returns a row of the table under :data:`HEAD`."""
        agree = self.planned == self.collectives
        sent = "as planned" if agree else f"{self.collectives}, planned {self.planned}"
        cells = (
            workload,
            ranks,
            f"{self.seconds * 1e3:.0f}",
            f"{self.predicted * 1e3:.0f}",
            f"{self.off:+.0%}",
            sent,
            f"{self.peak / 1e6:.0f}",
            f"{self.predicted_peak / 1e6:.0f}",
            f"{self.predicted_peak / self.peak - 1:+.0%}",
        )
        return f"| {' | '.join(map(str, cells))} |"


def compare(workload: str, ranks: int, rounds: int, steps: int) -> Compared:
    """Measures kernels and the machine, then steps, in each of ``rounds`` rounds.

    A process has memory that plans do not model: Python, torch and compiled code. This memory is
    the resident memory between steps beyond the shards and the optimizer's state, and is added to
    the predicted peak. Peaks are measured on :class:`Frugal` ranks.
    """
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        training = _start(stack, partial(Training, workload, MODE), ranks, cache)
        kernels = _start(stack, partial(Kernels, workload), ranks, cache)
        for _ in range(3):
            training.call("step")
        collectives = training.call("collectives")[0]
        seconds, told = [], []
        for _ in range(rounds):
            told.append(_predict(workload, kernels.call("measure")))
            costs = [training.call("step") for _ in range(steps)]
            seconds.append(statistics.median(max(cost.wall for cost in step) for step in costs))
        training.close()
        frugal = _start(stack, partial(Frugal, workload, MODE), ranks, cache)
        for _ in range(2):
            frugal.call("step")
        resting = [each.resident for each in frugal.call("memory")]
        frugal.call("step")
        peaks = [each.peak for each in frugal.call("memory")]
    peak, rest = max(zip(peaks, resting, strict=True))
    base = rest - told[0].memory["shards"] - told[0].memory["optimizer"]
    return Compared(
        seconds=statistics.median(seconds),
        predicted=statistics.median(found.seconds for found in told),
        off=statistics.median(p.seconds / s - 1 for p, s in zip(told, seconds, strict=True)),
        collectives={op: tuple(counted) for op, counted in collectives.items()},
        planned={op: (sent.number, sent.nbytes) for op, sent in told[0].traffic.items()},
        peak=peak,
        predicted_peak=base + told[0].peak,
    )


def _start(stack: ExitStack, make: partial[object], ranks: int, cache: str) -> Ranks:
    started = Ranks(make, ranks, cache)
    stack.callback(started.close)
    return started


def _predict(workload: str, measured: list[tuple[dict[str, float], Machine]]) -> Plan:
    """Predicts a step with the kernels of the slowest rank, since the other ranks wait for it."""
    shape = WORKLOADS[workload]
    return plan(
        shape.build,
        _call(shape),
        world_size=len(measured),
        machine=measured[0][1],
        shard=partial(_shard, shape),
        advise=False,
        seconds_by_kernel=max((kernels for kernels, _ in measured), key=lambda k: sum(k.values())),
    )


def _call(shape: Workload) -> dict[str, Any]:
    tokens = torch.zeros(shape.batch, shape.sequence, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def _shard(shape: Workload, model: torch.nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=shape.param_dtype, reduce_dtype=shape.reduce_dtype)
    shard_blocks(model, mesh, mp_policy=policy)
