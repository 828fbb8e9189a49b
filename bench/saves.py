"""Measures checkpoints that are saved while training goes on, and the start of a resumed run."""

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import deepcompile_zero3
from bench.command_line import add_ranks, add_workloads, console, print_table
from bench.modes import adamw, sharded
from bench.ranks import Ranks, join
from bench.workloads import WORKLOADS

HEAD = """\
| workload | save | steps alone, ms | during it | paired | it begins in, ms | it takes, s |
| --- | --- | ---: | ---: | ---: | ---: | ---: |"""
KINDS = {"dcp.async_save": False, "in a thread of low priority": True}
PHASES = ("model", "load", "first step", "second step")


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_workloads(part, ["A", "B"])
    add_ranks(part)
    part.add_argument("--rounds", type=int, default=5, help="saves")
    part.add_argument("--folder", default=".", help="on the disk to save to")


def run(args: argparse.Namespace) -> None:
    """Times steps while a checkpoint is saved, and the start of a run that resumes from one."""
    lines = [HEAD]
    starts = [f"| workload | cache | processes | {' | '.join(PHASES)} |"]
    starts.append(f"| --- | --- |{' ---: |' * (len(PHASES) + 1)}")
    for workload in args.workloads:
        with console.status(f"{workload}: compiling, and {args.rounds} saves"):
            taken = measure(workload, args.ranks, args.rounds, args.folder)
            lines += [times.row(workload, kind) for kind, times in taken.items()]
            for temperature, phases in resume(workload, args.ranks, args.folder):
                cells = " | ".join(f"{seconds:.2f}" for seconds in phases)
                starts.append(f"| {workload} | {temperature} | {cells} |")
    print_table([*lines, "", *starts], f"{args.ranks} ranks")


@dataclass
class Times:
    """Seconds on the slowest rank.

    Attributes:
        alone: of each step without a save.
        during: of each step that began while a save ran.
        ratios: for each save, the median step during it over the median of those before it.
        begin: for each save, until ``async_save`` returned.
        whole: for each save, until it was done.
    """

    alone: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    begin: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def row(self, workload: str, kind: str) -> str:
        """Returns a row below :data:`HEAD`."""
        cells = (
            f"{1e3 * median(self.alone):.0f}",
            f"{1e3 * median(self.during):.0f}",
            f"{median(self.ratios):.2f}",
            f"{1e3 * median(self.begin):.0f}",
            f"{median(self.whole):.1f}",
        )
        return f"| {workload} | {kind} | {' | '.join(cells)} |"


def measure(workload: str, ranks: int, saves: int, folder: str) -> dict[str, Times]:
    """Trains, saves, and trains on, by kind of save. Kinds alternate."""
    found = {kind: Times() for kind in KINDS}
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory(dir=folder) as target:
        running = Ranks(partial(Training, workload), ranks, cache)

        def step() -> float:
            return max(running.call("step"))

        try:
            for _ in range(3):
                step()
            for number in range(saves + 1):
                for kind, is_low in KINDS.items():
                    before = [step() for _ in range(6)]
                    start = time.perf_counter()
                    begin = max(running.call("begin_save", f"{target}/{number % 2}", is_low))
                    during = [step()]
                    while not all(running.call("is_saved")):
                        during.append(step())
                    if number == 0:  # makes the copies' memory
                        continue
                    times = found[kind]
                    times.whole.append(time.perf_counter() - start)
                    times.begin.append(begin)
                    times.alone += before
                    times.during += during
                    times.ratios.append(median(during) / median(before))
        finally:
            running.close()
    return found


def resume(workload: str, ranks: int, folder: str) -> list[tuple[str, list[float]]]:
    """Returns, for a cold and a warm cache of compiled graphs, seconds of each of the phases."""
    found = []
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory(dir=folder) as target:
        running = Ranks(partial(Training, workload), ranks, cache)
        try:
            running.call("step")
            running.call("save", target)
        finally:
            running.close()
        shutil.rmtree(cache)
        for temperature in ("cold", "warm"):
            start = time.perf_counter()
            running = Ranks(partial(Training, workload, meta=True), ranks, cache)
            try:
                made = [max(running.call("made"))]
                started = time.perf_counter() - start - made[0]
                phases = [started, *made]
                phases.append(max(running.call("load", target)))
                phases += [max(running.call("step")) for _ in range(2)]
            finally:
                running.close()
            found.append((temperature, phases))
    return found


class _OfLowPriority(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread
        return super().write_data(plan, planner)


class Training:
    """A rank of a workload in one graph, with AdamW."""

    def __init__(
        self, workload: str, rank: int, world_size: int, store: str, meta: bool = False
    ) -> None:
        join(rank, world_size, store)
        start = time.perf_counter()
        self._workload = WORKLOADS[workload]
        self._generator = torch.Generator().manual_seed(rank)
        if meta:
            with torch.device("meta"):
                self._model: nn.Module = sharded(self._workload, deepcompile_zero3.fully_shard)
            _materialize(self._model)
        else:
            self._model = sharded(self._workload, deepcompile_zero3.fully_shard)
        self._optimizer = adamw(self._model.parameters())
        self._run = torch.compile(self._model, backend="zero3")
        self._made = time.perf_counter() - start
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._saving: Future[Any] | Any = None

    def made(self) -> float:
        """Returns the seconds that the model took."""
        return self._made

    def step(self) -> float:
        """Takes a step, and returns its seconds."""
        tokens = self._workload.tokens(self._generator)
        dist.barrier()

        def one() -> None:
            self._run(input_ids=tokens, labels=tokens).loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

        return _seconds(one)

    def save(self, folder: str) -> float:
        """Saves at once."""
        return _seconds(lambda: dcp.save(self._state(), checkpoint_id=f"{folder}/blocking"))

    def begin_save(self, folder: str, is_low: bool) -> float:
        """Begins a save in the background, at a low priority or not."""
        writer = _OfLowPriority(folder) if is_low else dcp.FileSystemWriter(folder)

        def begin() -> None:
            self._saving = dcp.async_save(
                self._state(),
                storage_writer=writer,
                process_group=self._group,
                async_stager=self._stager,
            )

        return _seconds(begin)

    def is_saved(self) -> bool:
        """Returns whether the save is done."""
        if self._saving.done():
            self._saving.result()
        return self._saving.done()

    def load(self, folder: str) -> float:
        """Loads what :meth:`save` has saved."""

        def load() -> None:
            state = self._state()
            dcp.load(state, checkpoint_id=f"{folder}/blocking")
            set_state_dict(
                self._model,
                self._optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )

        return _seconds(load)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def _materialize(model: nn.Module) -> None:
    """Allocates what was built on the meta device. Llama computes its only buffer again."""
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "rope_init_fn"):
            module.inv_freq = module.original_inv_freq = module.rope_init_fn(module.config)[0]


def _seconds(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
