"""Times gloo's primitives for gathering and reducing, at some sizes."""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench import steps
from bench.command_line import add_ranks, print_table

SIZES = [64 << 10, 1 << 20, 8 << 20, 64 << 20]  # bytes of the full buffer


def _point_to_point(full: torch.Tensor, received: torch.Tensor) -> None:
    """Sends row ``r`` of ``full`` to rank ``r``; ``received`` gets the rows of the other ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    works = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        works.append(dist.irecv(received[source], source))
        works.append(dist.isend(full[target], target))
    for work in works:
        work.wait()


def _all_gather(full: torch.Tensor, other: torch.Tensor, shard: torch.Tensor) -> None:
    dist.all_gather_into_tensor(full.view(-1), shard)


def _gather_by_messages(full: torch.Tensor, other: torch.Tensor, shard: torch.Tensor) -> None:
    own = shard.expand(dist.get_world_size(), -1)
    full[dist.get_rank()].copy_(shard)
    _point_to_point(own, full)


def _reduce_scatter(full: torch.Tensor, other: torch.Tensor, shard: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(shard, full.view(-1))


def _reduce_by_all_to_all(full: torch.Tensor, other: torch.Tensor, shard: torch.Tensor) -> None:
    dist.all_to_all_single(other.view(-1), full.view(-1))
    torch.sum(other, 0, out=shard)


def _reduce_by_messages(full: torch.Tensor, other: torch.Tensor, shard: torch.Tensor) -> None:
    _point_to_point(full, other)
    other[dist.get_rank()].copy_(full[dist.get_rank()])
    torch.sum(other, 0, out=shard)


PRIMITIVES: dict[str, Callable] = {
    "all_gather_into_tensor": _all_gather,
    "gather by send and recv": _gather_by_messages,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single, sum": _reduce_by_all_to_all,
    "send and recv, sum": _reduce_by_messages,
}


def measure(nbytes: int, dtype: torch.dtype, rounds: int = 20) -> dict[str, tuple[float, float]]:
    """Returns median seconds of an exchange, and this rank's mean CPU seconds, by primitive."""
    world_size = dist.get_world_size()
    full = torch.ones(world_size, nbytes // dtype.itemsize // world_size, dtype=dtype)
    other, shard = torch.ones_like(full), torch.ones_like(full[0])
    walls: dict[str, list[float]] = {name: [] for name in PRIMITIVES}
    processor = dict.fromkeys(PRIMITIVES, 0.0)
    for _ in range(rounds):
        for name, run in PRIMITIVES.items():
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            run(full, other, shard)
            walls[name].append(time.perf_counter() - start)
            processor[name] += time.process_time() - before
    return {name: (median(walls[name]), processor[name] / rounds) for name in PRIMITIVES}


def _rank(rank: int, world_size: int, store: str, results: list) -> None:
    """Runs a rank's process; rank 0 appends a row for each dtype, size and primitive."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for dtype in (torch.float32, torch.bfloat16):
        for nbytes in SIZES:
            measured = measure(nbytes, dtype)
            for name, (wall, processor) in measured.items():
                if rank == 0:
                    results.append((str(dtype)[6:], nbytes, name, wall, processor * world_size))
    dist.destroy_process_group()


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_ranks(part)
    steps.add_malloc(part)


def run(args: argparse.Namespace) -> None:
    """Times gloo's primitives for gathering and reducing: GB of full buffers per second."""
    steps.tune_malloc(args.malloc)
    lines = ["| dtype | MiB | primitive | ms | GB/s | processor s/GB |"]
    lines.append("| --- | ---: | --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.list()
        mp.spawn(_rank, (args.ranks, f"{folder}/store", results), args.ranks)
        for dtype, nbytes, name, wall, processor in results:
            speed, price = nbytes / 1e9 / wall, processor / (nbytes / 1e9)
            row = f"{nbytes / 2**20:g} | {name} | {wall * 1e3:.2f} | {speed:.2f} | {price:.2f}"
            lines.append(f"| {dtype} | {row} |")
    print_table(lines, f"{args.ranks} ranks", f"{args.malloc} malloc")
