"""Trains a Llama with less memory than it takes, and compares it with training in memory."""

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bench.command_line import console, print_table
from bench.ranks import Memory, Ranks, join, memory_of_this_process
from bench.workloads import Workload

SHAPES = {
    "tiny": Workload("tiny", hidden=256, layers=2, intermediate=512, batch=2, sequence=128),
    "small": Workload(
        "97.5 M", hidden=768, layers=12, intermediate=2048, heads=12, batch=2, sequence=256
    ),
    "large": Workload(
        "365 M", hidden=1536, layers=12, intermediate=4096, heads=12, batch=2, sequence=256
    ),
}

# Freed memory goes back to the system, and is not kept for later: its price is page faults.
LEAN = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "ZERO3_KEEP_HEAP": "0"}
BUFFERS = 32 << 20  # bytes of communication buffers that are kept


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    part.add_argument("--shape", choices=SHAPES, default="small", help="of the Llama")
    part.add_argument("--budget-mb", type=float, default=0.0, help="memory_budget_mb (default: 0)")
    part.add_argument("--folder", default=".", help="on the disk to offload to")
    part.add_argument("--cgroup", help="folder of a control group, with the limit to train in")
    part.add_argument("--rounds", type=int, default=3, help="measured steps")


def run(args: argparse.Namespace) -> None:
    """Trains with a budget of memory, and what exceeds it in a file, beside training in memory."""
    written, read = bandwidth(args.folder)
    rows = []
    for row in compare(args.shape, args.budget_mb, args.folder, args.cgroup, args.rounds):
        rows.append(row)
        console.print(row.name)
    print_table([table(rows)], "2 ranks")
    print(f"\nThe disk: {written / 1e9:.2f} GB/s written, {read / 1e9:.2f} GB/s read.")


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        budget_mb: the memory budget, or None for all in memory.
        steps_in_backward: whether gradients are stepped, and freed, in backward.
        cgroup: folder of a control group that the ranks join, if any.
    """

    budget_mb: float | None = None
    steps_in_backward: bool = False
    cgroup: str | None = None


@dataclass(frozen=True)
class Step:
    """A step of one rank: seconds, the loss, and bytes written to the file and read from it."""

    seconds: float
    loss: float
    written: int = 0
    read: int = 0
    transfer: float = 0.0  # seconds
    waited: float = 0.0  # seconds of these that computation waited


@dataclass(frozen=True)
class Row:
    """What a way of training took.

    Attributes:
        name: the way.
        losses: the loss of each step of rank 0, also of those that are not measured.
        steps: the measured steps of rank 0.
        rest, peak: the ranks' memory between steps, and at its peak in the measured steps.
        held: bytes of the ranks' shards, optimizer states and buffers that are in memory between
            steps.
    """

    name: str
    losses: list[float]
    steps: list[Step]
    rest: list[Memory]
    peak: list[Memory]
    held: list[int]

    @property
    def peak_of_model(self) -> int:
        """Peak in bytes beyond what Python, torch and its compiler leave in memory."""
        ranks = zip(self.peak, self.rest, self.held, strict=True)
        return max(peak.peak - rest.resident + held for peak, rest, held in ranks)


class Rank:
    """A rank that trains in one way."""

    def __init__(
        self, shape: str, way: Way, folder: str, rank: int, world_size: int, store: str
    ) -> None:
        if way.cgroup is not None:
            with open(f"{way.cgroup}/cgroup.procs", "w") as procs:
                procs.write(str(os.getpid()))
        join(rank, world_size, store)
        import deepcompile_zero3 as zero3

        zero3.limit_buffers(BUFFERS)
        self._buffer_stats = zero3.buffer_stats
        self._shape = replace(SHAPES[shape], device="meta")
        self._policy = None
        settings: dict = {"reshard_after_forward": True, "transport": "c10d"}
        if way.budget_mb is not None:
            self._policy = zero3.FileOffloadPolicy(folder, way.budget_mb)
            settings["offload_policy"] = self._policy
        model = self._shape.build()
        for layer in model.model.layers:
            zero3.fully_shard(layer, **settings)
        zero3.fully_shard(model, **settings).to_empty(device="cpu")
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
        generator = torch.Generator().manual_seed(rank)
        for parameter in model.parameters():
            local = parameter.to_local().detach()
            if parameter.dim() > 1:
                local.normal_(0, 0.02, generator=generator)
            else:
                local.fill_(1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        if way.budget_mb is not None:
            zero3.offload_optimizer(model, optimizer)
        if way.steps_in_backward:
            zero3.step_in_backward(model, optimizer, bucket_mb=32)
        self._optimizer = optimizer
        self._run = torch.compile(model, backend="zero3")
        self._generator = generator
        self.memory()

    def step(self) -> Step:
        tokens = replace(self._shape, device="cpu").tokens(self._generator)
        before = self._policy and self._policy.stats()
        dist.barrier()
        start = time.perf_counter()
        loss = self._run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - start
        if self._policy is None:
            return Step(seconds, loss.item())
        after = self._policy.stats()
        names = ("written", "read", "transfer_time", "wait_time")
        moved = (getattr(after, name) - getattr(before, name) for name in names)
        return Step(seconds, loss.item(), *moved)

    def memory(self) -> Memory:
        return memory_of_this_process()

    def held(self) -> int:
        from deepcompile_zero3.runtime import _C

        values = chain.from_iterable(
            (parameter, *self._optimizer.state[parameter].values())
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        )
        tensors = (each.to_local() for each in values if isinstance(each, DTensor))
        here = sum(each.nbytes for each in tensors if not _C.is_in_file(each))
        return here + self._buffer_stats().kept


def compare(
    shape: str, budget_mb: float, folder: str, cgroup: str | None, steps: int
) -> Iterator[Row]:
    """Yields a row for each way of training. The first two steps are not measured."""
    ways = {
        "in memory": Way(),
        "in memory, stepped in backward": Way(steps_in_backward=True),
        f"budget of {budget_mb:g} MiB, stepped in backward": Way(budget_mb, True, cgroup),
    }
    os.environ.update(LEAN)
    with TemporaryDirectory() as cache:
        for name, way in ways.items():
            ranks = Ranks(partial(Rank, shape, way, folder), 2, cache)
            try:
                losses = [ranks.call("step")[0].loss for _ in range(2)]
                rest, held = ranks.call("memory"), ranks.call("held")
                measured = [ranks.call("step")[0] for _ in range(steps)]
                peak = ranks.call("memory")
            finally:
                ranks.close()
            losses += [step.loss for step in measured]
            yield Row(name, losses, measured, rest, peak, held)


def bandwidth(folder: str, nbytes: int = 512 << 20) -> tuple[float, float]:
    """Returns the bytes/s at which a file in ``folder`` is written to the disk, and read."""
    data = os.urandom(1 << 20)
    with TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(nbytes >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(1 << 20):
            pass
        return nbytes / written, nbytes / (time.perf_counter() - start)


def table(rows: Iterable[Row]) -> str:
    """Returns the rows of :func:`compare` as a table."""
    lines = [
        "| | step, s | at rest, MiB | peak, MiB | of the model, MiB | written, MiB | read, MiB "
        "| hidden | loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    mib = 2**20
    for row in rows:
        steps, rest, peak = row.steps, row.rest, row.peak
        seconds = median(step.seconds for step in steps)
        written, read = (
            median(getattr(step, kind) for step in steps) / mib for kind in ("written", "read")
        )
        transfer, waited = (sum(getattr(s, k) for s in steps) for k in ("transfer", "waited"))
        hidden = f"{1 - waited / transfer:.0%}" if transfer else ""
        lines.append(
            f"| {row.name} | {seconds:.2f} | {rest[0].resident / mib:.0f} "
            f"| {peak[0].peak / mib:.0f} | {row.peak_of_model / mib:.0f} "
            f"| {written:.0f} | {read:.0f} | {hidden} | {row.losses[-1]:.9f} |"
        )
    return "\n".join(lines)
