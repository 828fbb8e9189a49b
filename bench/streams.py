"""Measures streams of full parameters beside a plain copy, and loads of safetensors files."""

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import deepcompile_zero3
from bench.command_line import add_ranks, console, print_table
from bench.ranks import Ranks, join, memory_of_this_process
from deepcompile_zero3 import (
    load_safetensors,
    release_buffers,
    save_safetensors,
    stream_full_parameters,
)

HEAD = """\
| max_mb | stream, GB/s | copy, GB/s | ratio | by processor | first, GB/s | peak, MiB | of max_mb |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""
LOADS = """\
| ranks | a rank's shards, MiB | peak above rest, MiB | over the shards, MiB | GB/s |
| ---: | ---: | ---: | ---: | ---: |"""
MIB = 2**20
_WIDTH = 2048  # 8 KiB a row


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    part.add_argument("--mib", type=int, default=2048, help="size of the model, at least")
    part.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[2048],
        help="rows of the model's matrices, in turn, of 8 KiB each",
    )
    part.add_argument("--max-mb", type=float, nargs="+", default=[32, 128], metavar="MB")
    add_ranks(part)
    part.add_argument("--rounds", type=int, default=10, help="streams, and copies, of each size")
    part.add_argument(
        "--load-ranks", type=int, nargs="*", default=[1, 2, 4], help="ranks that load files"
    )
    part.add_argument("--folder", default=".", help="on the disk for the files")


def run(args: argparse.Namespace) -> None:
    """Streams full parameters, beside a plain copy, and loads files into 1, 2 and 4 ranks."""
    model = partial(Model, args.mib, args.rows)
    with (
        console.status(f"a model of {args.mib} MiB"),
        tempfile.TemporaryDirectory() as cache,
        tempfile.TemporaryDirectory(dir=args.folder) as files,
    ):
        is_saved = bool(args.load_ranks)
        running = Ranks(model, args.ranks, cache)
        try:
            streams = measure(running, args.max_mb, args.rounds)
            if is_saved:
                running.call("save", files)
        finally:
            running.close()
        loads = [_load(partial(model, meta=True), each, cache, files) for each in args.load_ranks]
    print_table([HEAD, *streams], f"{args.ranks} ranks")
    if is_saved:
        print()
        print_table([LOADS, *loads], f"saved by {args.ranks} ranks")


class Round(NamedTuple):
    """One of several rounds of a copy, the first stream of a job, and a later one.

    Attributes:
        copy: seconds in which all ranks copy their shards to memory of three buckets, again and
            again, which is what a stream has to do at least.
        copy_processor: processor seconds of the rank that takes most of them.
        first: seconds of a stream of all parameters whose memory is new.
        stream: seconds of a stream in the memory of the one before.
        processor: processor seconds of the rank that takes most of them in it.
    """

    copy: float
    copy_processor: float
    first: float
    stream: float
    processor: float


def measure(running: Ranks, sizes: list[float], rounds: int) -> list[str]:
    """Streams the model of ``running``. Returns a row below :data:`HEAD` for each of ``sizes``."""
    assert all(running.call("is_equal"))
    nbytes = running.call("nbytes")[0]
    rows = []
    for max_mb in sizes:
        peak = max(running.call("peak", max_mb))
        found = []
        for _ in range(rounds):
            copied = _slowest(running.call("copy"))
            running.call("release")
            first, _ = _slowest(running.call("stream", max_mb))
            found.append(Round(*copied, first, *_slowest(running.call("stream", max_mb))))
        cells = (
            f"{max_mb:g}",
            f"{nbytes / median(each.stream for each in found) / 1e9:.1f}",
            f"{nbytes / median(each.copy for each in found) / 1e9:.1f}",
            f"{median(each.copy / each.stream for each in found):.2f}",
            f"{median(each.copy_processor / each.processor for each in found):.2f}",
            f"{nbytes / median(each.first for each in found) / 1e9:.1f}",
            f"{peak / MIB:.0f}",
            f"{peak / MIB / max_mb:.2f}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _load(model: "partial[Model]", ranks: int, cache: str, files: str) -> str:
    """Returns a row below :data:`LOADS`."""
    running = Ranks(model, ranks, cache)
    try:
        seconds, above, shards = map(max, zip(*running.call("load", files), strict=True))
        nbytes = running.call("nbytes")[0]
    finally:
        running.close()
    row = f"{shards / MIB:.0f} | {above / MIB:.0f} | {(above - shards) / MIB:.0f}"
    return f"| {ranks} | {row} | {nbytes / seconds / 1e9:.1f} |"


class Model:
    """A rank of a model of matrices of 2048 columns, at least ``mib`` MiB of them."""

    def __init__(
        self,
        mib: int,
        rows: list[int],
        rank: int,
        world_size: int,
        store: str,
        meta: bool = False,
    ) -> None:
        join(rank, world_size, store)
        torch.manual_seed(0)
        self._model = nn.Sequential()
        of_matrices = cycle(rows)
        while self.nbytes() < mib * MIB:
            with torch.device("meta" if meta else "cpu"):
                layer = nn.Linear(_WIDTH, next(of_matrices), bias=False)
            self._model.append(deepcompile_zero3.fully_shard(layer))
        deepcompile_zero3.fully_shard(self._model)

    def nbytes(self) -> int:
        """Returns the size of all parameters."""
        return sum(parameter.numel() * 4 for parameter in self._model.parameters())

    def is_equal(self) -> bool:
        """Returns whether a stream has the bits of ``full_tensor()``."""
        return all(
            torch.equal(
                tensor.view(torch.int32),
                self._model.get_parameter(name).full_tensor().view(torch.int32),  # type: ignore
            )
            for name, tensor in stream_full_parameters(self._model)
        )

    def release(self) -> None:
        """Frees what the stream before has kept."""
        release_buffers()

    def peak(self, max_mb: float) -> int:
        """Returns the peak above rest of a stream whose consumer reads all of it, in bytes."""
        release_buffers()
        rest = memory_of_this_process().resident
        dist.barrier()
        for _, tensor in stream_full_parameters(self._model, max_mb=max_mb):
            assert tensor is not None
            tensor.view(-1)[:: mmap.PAGESIZE // 4].sum()
        return memory_of_this_process().peak - rest

    def stream(self, max_mb: float) -> tuple[float, float]:
        """Returns seconds of a stream, and those of the processor."""
        dist.barrier()

        def all_of_them() -> None:
            for _ in stream_full_parameters(self._model, max_mb=max_mb):
                pass

        return _seconds(all_of_them)

    def copy(self) -> tuple[float, float]:
        """Returns seconds in which this rank copies its shards, and those of the processor."""
        shards = [each.flatten() for each in self._shards()]
        places = [torch.ones_like(max(shards, key=len)) for _ in range(3)]
        dist.barrier()

        def all_of_them() -> None:
            for place, shard in zip(cycle(places), shards):
                place[: len(shard)].copy_(shard)

        return _seconds(all_of_them)

    def save(self, folder: str) -> None:
        """Saves safetensors files."""
        save_safetensors(self._model, folder)

    def load(self, folder: str) -> tuple[float, int, int]:
        """Returns the seconds of a load, the peak above rest, and the bytes of this rank's
        shards.
        """
        for name in os.listdir(folder):  # a file that was just written is in memory
            with open(os.path.join(folder, name), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        rest = memory_of_this_process().resident
        dist.barrier()

        def all_of_it() -> None:
            self._model.to_empty(device="cpu")
            load_safetensors(self._model, folder)

        seconds, _ = _seconds(all_of_it)
        peak = memory_of_this_process().peak - rest
        return seconds, peak, sum(each.nbytes for each in self._shards())

    def _shards(self) -> list[torch.Tensor]:
        found = []
        for parameter in self._model.parameters():
            assert isinstance(parameter, DTensor)
            found.append(parameter.to_local().detach())
        return found


def _slowest(of_ranks: list[tuple[float, ...]]) -> list[float]:
    """Returns the largest of each number over the ranks."""
    return [max(numbers) for numbers in zip(*of_ranks, strict=True)]


def _seconds(act: Callable[[], None]) -> tuple[float, float]:
    """Returns the seconds of ``act``, and those of this thread's processor."""
    start, processor = time.perf_counter(), time.thread_time()
    act()
    return time.perf_counter() - start, time.thread_time() - processor
