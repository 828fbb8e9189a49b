"""Measures the host's time of a step: many small parameters, hardly any computation."""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DistributedDataParallel

import deepcompile_zero3
from bench.command_line import add_ranks, console, print_table

WIDTH = 8
PHASES = ("forward", "backward", "clip", "optimizer", "zero_grad")
PARAMETERS = 4  # of a block


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def _sharded(blocks: int, shard: Callable, compiled: str, **settings: str) -> nn.Module:
    """Shards each block, and compiles the "model", its "blocks" or nothing ("no")."""
    model = nn.Sequential(*(_Block() for _ in range(blocks)))
    for block in model:
        shard(block)
        if compiled == "blocks":
            block.compile(**settings)
    shard(model)
    if compiled == "model":
        model.compile(**settings)
    return model


def _whole(blocks: int) -> nn.Module:
    model = nn.Sequential(*(_Block() for _ in range(blocks)))
    model.compile()
    return model


def _ddp(blocks: int) -> nn.Module:
    model = DistributedDataParallel(nn.Sequential(*(_Block() for _ in range(blocks))))
    model.compile()
    return model


_ours = partial(_sharded, shard=deepcompile_zero3.fully_shard, backend="zero3")
_fsdp2 = partial(_sharded, shard=fsdp2)
MODES: dict[str, Callable[[int], nn.Module]] = {
    "one process's graph, nothing sharded": _whole,
    "zero3, one graph": partial(_ours, compiled="model"),
    "zero3, blocks": partial(_ours, compiled="blocks"),
    "zero3, eager": partial(_ours, compiled="no"),
    "FSDP2, blocks": partial(_fsdp2, compiled="blocks"),
    "FSDP2, eager": partial(_fsdp2, compiled="no"),
    "DDP": _ddp,
}


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    part.add_argument("--blocks", type=int, nargs="+", default=[64, 256], metavar="N")
    add_ranks(part)
    part.add_argument("--rounds", type=int, default=15, help="steps of each mode")


def run(args: argparse.Namespace) -> None:
    """Times the host: microseconds of a rank's processor a parameter, for each phase of a step."""
    lines = [f"| blocks | mode | {' | '.join(PHASES)} | all |"]
    lines.append(f"| ---: | --- |{' ---: |' * (len(PHASES) + 1)}")
    for blocks in args.blocks:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            rows = manager.list()
            given = args.ranks, f"{folder}/store", blocks, args.rounds, rows
            with console.status(
                f"{blocks} blocks: compiling, and {args.rounds} steps of each mode"
            ):
                mp.spawn(measure, given, args.ranks)
            for name, phases in rows:
                each = [1e6 * seconds / (PARAMETERS * blocks) for seconds in phases]
                cells = " | ".join(f"{time:.1f}" for time in (*each, sum(each)))
                lines.append(f"| {blocks} | {name} | {cells} |")
    print_table(lines, f"{args.ranks} ranks")


def measure(rank: int, world_size: int, store: str, blocks: int, rounds: int, rows: list) -> None:
    """Runs a rank's process. Rank 0 appends (mode, seconds of its processor for each phase)."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    x = torch.randn(2, WIDTH)
    models = {name: build(blocks) for name, build in MODES.items()}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()
    }
    seconds: dict[str, list[list[float]]] = {name: [] for name in models}
    for _ in range(rounds + 3):
        for name, model in models.items():
            dist.barrier()
            seconds[name].append(_step(model, optimizers[name], x))
    if rank == 0:
        for name, steps in seconds.items():
            rows.append((name, [median(phase) for phase in zip(*steps[3:], strict=True)]))
    dist.barrier()
    dist.destroy_process_group()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> list[float]:
    """Returns the seconds of this process's processor for each of PHASES."""
    is_ours = isinstance(model, deepcompile_zero3.Zero3Module)
    clip = deepcompile_zero3.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_
    loss = None

    def forward() -> None:
        nonlocal loss
        loss = model(x).sum()

    found = []
    for run in (
        forward,
        lambda: loss.backward(),
        lambda: clip(model.parameters(), 1.0),
        optimizer.step,
        optimizer.zero_grad,
    ):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return found
