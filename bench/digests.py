"""Measures the price of a digest: steps that have one alternate with steps that have none."""

import argparse
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import deepcompile_zero3
from bench.command_line import add_ranks, add_workloads, console, print_table
from bench.modes import adamw, sharded
from bench.ranks import Ranks, join
from bench.workloads import WORKLOADS
from deepcompile_zero3 import training_digest


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_workloads(part, ["A", "B"])
    add_ranks(part)
    part.add_argument("--rounds", type=int, default=15, help="steps of each kind")


def run(args: argparse.Namespace) -> None:
    """Times steps with a digest of shards, gradients and states, and steps without."""
    lines = [HEAD]
    for workload in args.workloads:
        with console.status(f"{workload}: compiling, and {args.rounds} steps of each kind"):
            lines.append(measure(workload, args.ranks, args.rounds).row(workload))
    print_table(lines, f"{args.ranks} ranks")


@dataclass(frozen=True)
class Price:
    """Results on the slowest rank.

    Attributes:
        step: seconds of a step without a digest, the median.
        digest: seconds of a digest, the median.
        processor: seconds of a processor that a digest takes, the median.
        elements: elements of a rank that are in a digest.
        nbytes: their bytes.
    """

    step: float
    digest: float
    processor: float
    elements: int
    nbytes: int

    def row(self, workload: str) -> str:
        """Returns a row below :data:`HEAD`."""
        each = 1e9 * self.processor / self.elements
        cells = (
            f"{1e3 * self.step:.0f}",
            f"{1e3 * self.digest:.1f}",
            f"{each:.3f}",
            f"{self.nbytes / self.digest / 1e9:.1f}",
            f"{self.digest / (10 * self.step):.2%}",
        )
        return f"| {workload} | {' | '.join(cells)} |"


HEAD = """\
| workload | step, ms | digest, ms | ns an element | GB/s a rank | price, each tenth step |
| --- | ---: | ---: | ---: | ---: | ---: |"""


def measure(workload: str, ranks: int, rounds: int) -> Price:
    """Takes ``rounds`` steps with a digest, and as many without."""
    with tempfile.TemporaryDirectory() as cache:
        running = Ranks(partial(Training, workload), ranks, cache)
        try:
            for _ in range(3):
                running.call("step", True)
            steps, digests, processor = [], [], []
            for _ in range(rounds):
                steps.append(max(step for step, _, _ in running.call("step", False)))
                taken = running.call("step", True)
                digests.append(max(wall for _, wall, _ in taken))
                processor.append(max(seconds for _, _, seconds in taken))
            sizes = running.call("sizes")
        finally:
            running.close()
    elements, nbytes = max(sizes)
    return Price(median(steps), median(digests), median(processor), elements, nbytes)


class Training:
    """A rank of a workload in one graph, with AdamW."""

    def __init__(self, workload: str, rank: int, world_size: int, store: str) -> None:
        join(rank, world_size, store)
        self._workload = WORKLOADS[workload]
        self._generator = torch.Generator().manual_seed(rank)
        self._model: nn.Module = sharded(self._workload, deepcompile_zero3.fully_shard)
        self._optimizer = adamw(self._model.parameters())
        self._run = torch.compile(self._model, backend="zero3")

    def step(self, with_digest: bool) -> tuple[float, float, float]:
        """Returns seconds of the step, of the digest, and of the processor for the digest."""
        tokens = self._workload.tokens(self._generator)
        dist.barrier()
        start = time.perf_counter()
        self._run(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        step = time.perf_counter() - start
        dist.barrier()
        start, processor = time.perf_counter(), time.thread_time()
        if with_digest:
            training_digest(self._model, self._optimizer)
        digest, processor = time.perf_counter() - start, time.thread_time() - processor
        start = time.perf_counter()
        self._optimizer.zero_grad()
        return step + time.perf_counter() - start, digest, processor

    def sizes(self) -> tuple[int, int]:
        """Returns elements and bytes that this rank reads for a digest."""
        read = []
        for parameter in self._model.parameters():
            # A gradient is like its parameter.
            read += [parameter, parameter, *self._optimizer.state[parameter].values()]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in read]
        return sum(each.numel() for each in local), sum(each.nbytes for each in local)
