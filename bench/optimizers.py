"""Times optimizers: Muon with and without owners of its matrices, and AdamW on small parameters."""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from bench.command_line import add_ranks, print_table
from deepcompile_zero3 import MatrixOwners, clip_grad_norm_, fully_shard, step_locally

WIDTH, INNER, LAYERS = 512, 1408, 4
SMALL = 1500  # parameters of 64 elements


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_ranks(part)
    part.add_argument("--rounds", type=int, default=15, help="steps of each optimizer")


def run(args: argparse.Namespace) -> None:
    """Times Muon on a Llama of 4 layers, and AdamW on 1,500 small parameters."""

    def rows_of(measure: Callable) -> list:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            rows = manager.list()
            mp.spawn(measure, (args.ranks, f"{folder}/store", args.rounds, rows), args.ranks)
            return list(rows)

    rows = rows_of(muon)
    base = rows[0][1]
    lines = ["| optimizer | ms a step | owners' time over it | collectives |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, seconds, collectives in rows:
        lines.append(f"| {name} | {seconds * 1e3:.0f} | {base / seconds:.2f} | {collectives} |")
    lines.append("\n| optimizer | parameters | clip, ms | step | zero_grad | over plain |")
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |")
    for kind, name, *times in rows_of(small):
        if "plain" in name:
            base = sum(times)
        cells = " | ".join(f"{seconds * 1e3:.1f}" for seconds in times)
        lines.append(f"| {kind} | {name} | {cells} | {sum(times) / base:.2f} |")
    print_table(lines, f"{args.ranks} ranks")


class _Layer(nn.Module):
    """The matrices of a layer of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.attention:
            x = linear(x)
        return self.down(self.up[0](x) * self.up[1](x))


def _sharded(has_owners: bool) -> Iterable[nn.Parameter]:
    model = nn.Sequential(*(_Layer() for _ in range(LAYERS)))
    owners = MatrixOwners(model) if has_owners else None
    for layer in model:
        fully_shard(layer, shard_placement_fn=owners)
    fully_shard(model, shard_placement_fn=owners)
    (model(torch.randn(4, WIDTH)) - 1).square().mean().backward()
    return model.parameters()


def _plain() -> Iterable[nn.Parameter]:
    model = nn.Sequential(*(_Layer() for _ in range(LAYERS)))
    (model(torch.randn(4, WIDTH)) - 1).square().mean().backward()
    return model.parameters()


def _start(rank: int, world_size: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def _seconds(run: Callable[[], object]) -> float:
    """Returns how long ``run`` takes the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    run()
    slowest = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def muon(rank: int, world_size: int, store: str, rounds: int, results: list) -> None:
    """Runs a rank's process; rank 0 appends a row for each way to step."""
    _start(rank, world_size, store)
    ways = {
        "Muon, one rank owns each matrix": torch.optim.Muon(_sharded(has_owners=True)),
        "the same with step_locally": torch.optim.Muon(_sharded(has_owners=True)),
        "Muon, shards are gathered": torch.optim.Muon(_sharded(has_owners=False)),
        "Muon, every rank updates all (DDP)": torch.optim.Muon(_plain()),
        "AdamW on shards": torch.optim.AdamW(_sharded(has_owners=False)),
    }
    step_locally(ways["the same with step_locally"])
    collectives = {}
    for name, optimizer in ways.items():
        with CommDebugMode() as counted:
            optimizer.step()
        collectives[name] = counted.get_total_counts()
    walls: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, optimizer in ways.items():
            walls[name].append(_seconds(optimizer.step))
    if rank == 0:
        results += [(name, median(walls[name]), collectives[name]) for name in ways]
    dist.destroy_process_group()


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(SMALL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weight * x).sum() for weight in self.weights]).sum()


def small(rank: int, world_size: int, store: str, rounds: int, results: list) -> None:
    """Runs a rank's process; rank 0 appends a row for each model and each kind of AdamW."""
    _start(rank, world_size, store)
    plain = [nn.Parameter(torch.randn(8 // world_size, 8)) for _ in range(SMALL)]
    for parameter in plain:
        parameter.grad = torch.randn_like(parameter)
    for kind in ("", "foreach", "fused"):
        adamw = partial(torch.optim.AdamW, **({kind: True} if kind else {}))
        ways = {"plain tensors of the shards' size": (plain, nn.utils.clip_grad_norm_)}
        models = []
        for name, shard, clip in (
            ("FSDP2", torch_fully_shard, nn.utils.clip_grad_norm_),
            ("zero3", fully_shard, clip_grad_norm_),
            ("zero3, step_locally", fully_shard, clip_grad_norm_),
        ):
            model = shard(_Small())
            models.append(model)  # which lives, as in training
            model(torch.randn(8, 8)).backward()
            ways[name] = list(model.parameters()), clip
        optimizers = {name: adamw(parameters) for name, (parameters, _) in ways.items()}
        step_locally(optimizers["zero3, step_locally"])
        walls: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, (parameters, clip) in ways.items():
                optimizer = optimizers[name]
                gradients = [parameter.grad for parameter in parameters]
                times = [_seconds(partial(clip, parameters, 1.0)), _seconds(optimizer.step)]
                times.append(_seconds(optimizer.zero_grad))
                walls[name].append(tuple(times))
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
        if rank == 0:
            for name in ways:
                medians = [median(column) for column in zip(*walls[name][1:], strict=True)]
                results.append((f"AdamW {kind}".strip(), name, *medians))
    dist.destroy_process_group()
