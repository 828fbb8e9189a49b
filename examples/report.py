"""Measures what a step costs in time, CPU, communication and memory, and shows tables."""

import ctypes
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import record_collectives

ROUNDS = 8
MIB = 2**20


@dataclass
class StepCost:
    """The cost of a step of one variant of the model, on one rank."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)  # by op
    nbytes: Counter[str] = field(default_factory=Counter)  # by op, bytes of unsharded buffers
    peak_bytes: int | None = None  # growth of the process; None if unknown


@dataclass
class RankReport:
    """The measurements of one rank."""

    steps: dict[str, StepCost]
    parameter_bytes: int
    optimizer_bytes: int
    resting_bytes: int | None  # the whole process, code and compiler included


def show(
    console: Console,
    variants: Mapping[str, nn.Module],
    step: Callable[[nn.Module], object],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Measures ``step(module)`` for every variant and prints the costs. All ranks must call it.

    Args:
        console: the console that rank 0 prints to.
        variants: modules to compare, by name, the baseline last. They share their parameters.
        step: one whole training step, run about a dozen times. It must leave no gradients.
        optimizer: the optimizer of the parameters, which already has its state.
    """
    steps = _measure(variants, step)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    mine = RankReport(steps, _local_bytes(parameters), _local_bytes(state), _resting_bytes())

    reports: list[RankReport | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, mine)
    everyone = [report for report in reports if report is not None]
    console.print()
    console.print(_step_table(everyone))
    console.print(_memory_table(everyone))


def _measure(
    variants: Mapping[str, nn.Module], step: Callable[[nn.Module], object]
) -> dict[str, StepCost]:
    """Measures variants in turn, so that other load on the machine slows every variant alike."""
    costs = {name: StepCost() for name in variants}
    for name, module in variants.items():
        with record_collectives() as log:  # this also warms the variant up
            step(module)
        for record in log:
            costs[name].collectives[record.op] += 1
            costs[name].nbytes[record.op] += record.nbytes
    for _ in range(ROUNDS):
        for name, module in variants.items():
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            step(module)
            costs[name].seconds.append(time.perf_counter() - start)
            costs[name].cpu_seconds.append(time.process_time() - cpu_start)
    for name, module in variants.items():
        costs[name].peak_bytes = _growth(lambda module=module: step(module))
    return costs


def _step_table(reports: list[RankReport]) -> Table:
    """Returns a table with a column for each variant, and the ratio of the first to the last."""
    names = list(reports[0].steps)
    table = Table(title="One training step", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    compare = len(names) > 1
    if compare:
        table.add_column(f"{names[0]} / {names[-1]}", justify="right")

    def add(label: str, values: list[float], form: Callable[[int], str]) -> None:
        cells = [form(column) for column in range(len(names))]
        if compare:
            cells.append(f"{values[0] / values[-1]:.2f}" if values[-1] else "-")
        table.add_row(label, *cells)

    # A step lasts as long as its slowest rank; CPU time is paid by all.
    seconds = [max(median(r.steps[name].seconds) for r in reports) for name in names]
    cpu = [sum(median(r.steps[name].cpu_seconds) for r in reports) for name in names]
    add("time, median", seconds, lambda i: f"{seconds[i] * 1e3:,.0f} ms")
    add("CPU time, all ranks", cpu, lambda i: f"{cpu[i] * 1e3:,.0f} ms")
    labels = {"all_gather": "gathered", "reduce_scatter": "reduced", "all_reduce": "all-reduced"}
    for op, label in labels.items():
        costs = [reports[0].steps[name] for name in names]
        if any(cost.collectives[op] for cost in costs):
            sizes = [cost.nbytes[op] / MIB for cost in costs]
            counts = [cost.collectives[op] for cost in costs]
            add(label, sizes, lambda i, s=sizes, c=counts: f"{s[i]:,.1f} MiB in {c[i]}")
    return table


def _memory_table(reports: list[RankReport]) -> Table:
    """Returns a table with a column of memory for each rank."""
    table = Table(title="Memory of each rank, MiB", title_justify="left")
    table.add_column("")
    for rank in range(len(reports)):
        table.add_column(f"rank {rank}", justify="right")

    def add(label: str, values: list[int | None]) -> None:
        table.add_row(label, *("-" if v is None else f"{v / MIB:,.1f}" for v in values))

    add("parameters, its shards", [r.parameter_bytes for r in reports])
    add("optimizer state", [r.optimizer_bytes for r in reports])
    add("process between steps", [r.resting_bytes for r in reports])
    for name in reports[0].steps:
        add(f"+ at the peak of a step, {name}", [r.steps[name].peak_bytes for r in reports])
    return table


def _local_bytes(tensors: list[object]) -> int:
    """Returns the bytes of this rank's part of the tensors in ``tensors``."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.nbytes for t in local if isinstance(t, torch.Tensor))


def _growth(run: Callable[[], object]) -> int | None:
    """Returns the bytes by which this process's memory grew, at its peak, while ``run`` ran."""
    before = _resting_bytes()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        before = None
    run()
    peak = _resident_bytes("VmHWM")
    return None if before is None or peak is None else peak - before


def _resting_bytes() -> int | None:
    """Returns the bytes of memory that this process holds, without memory that malloc caches."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return _resident_bytes("VmRSS")


def _resident_bytes(key: str) -> int | None:
    """Returns bytes of ``/proc/self/status``, or None if the file or the key does not exist."""
    status = Path("/proc/self/status")
    found = (
        re.search(rf"^{key}:\s+(\d+) kB$", status.read_text(), re.M) if status.exists() else None
    )
    return int(found[1]) * 1024 if found else None
