"""Measures streams of full parameters beside a plain copy, and loads of safetensors files."""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import deepcompile_zero3
from bench.command_line import add_ranks, console, print_table
from bench.ranks import Ranks, join, memory_of_this_process
from deepcompile_zero3 import load_safetensors, save_safetensors, stream_full_parameters

HEAD = """\
| max_mb | stream, GB/s | plain copy, GB/s | ratio | by processor | peak, MiB | over max_mb |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""
LOADS = """\
| ranks | a rank's shards, MiB | peak above rest, MiB | over the shards, MiB | GB/s |
| ---: | ---: | ---: | ---: | ---: |"""
MIB = 2**20
_WIDTH = 2048  # a parameter has 16 MiB


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    part.add_argument("--mib", type=int, default=2048, help="size of the model")
    part.add_argument("--max-mb", type=float, nargs="+", default=[32, 128], metavar="MB")
    add_ranks(part)
    part.add_argument("--rounds", type=int, default=6, help="streams, and copies, of each size")
    part.add_argument("--folder", default=".", help="on the disk for the files")


def run(args: argparse.Namespace) -> None:
    """Streams full parameters, beside a plain copy, and loads files into 1, 2 and 4 ranks."""
    with console.status(f"a model of {args.mib} MiB"):
        lines = measure(args.mib, args.ranks, args.max_mb, args.rounds, args.folder)
    print_table(lines, f"{args.ranks} ranks")


@dataclass(frozen=True)
class Stream:
    """The best of several streams and copies, which alternate, and the highest peak.

    Attributes:
        stream: seconds of a stream of all parameters.
        copy: seconds in which all ranks copy their shards to memory of three buckets, again and
            again, which is what a stream has to do at least.
        stream_processor: processor seconds of the rank that takes most of them in a stream.
        copy_processor: likewise in a copy.
        peak: bytes of a rank's resident memory above rest.
    """

    stream: float
    copy: float
    stream_processor: float
    copy_processor: float
    peak: int

    def row(self, nbytes: int, max_mb: float) -> str:
        """Returns a row below :data:`HEAD`."""
        cells = (
            f"{max_mb:g}",
            f"{nbytes / self.stream / 1e9:.1f}",
            f"{nbytes / self.copy / 1e9:.1f}",
            f"{self.copy / self.stream:.2f}",
            f"{self.copy_processor / self.stream_processor:.2f}",
            f"{self.peak / MIB:.0f}",
            f"{self.peak / MIB / max_mb:.2f}",
        )
        return f"| {' | '.join(cells)} |"


def measure(mib: int, ranks: int, sizes: list[float], rounds: int, folder: str) -> list[str]:
    """Streams a model of ``mib`` MiB from its ranks, and loads it into other numbers of ranks.

    Returns the lines of two tables.
    """
    streams, loads = [HEAD], [LOADS]
    nbytes = mib * MIB
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory(dir=folder) as files:
        running = Ranks(partial(Model, mib), ranks, cache)
        try:
            assert all(running.call("is_equal"))
            for max_mb in sizes:
                streamed, copied = [], []
                for _ in range(rounds):
                    copied.append(_slowest(running.call("copy", max_mb)))
                    streamed.append(_slowest(running.call("stream", max_mb)))
                copy, copy_processor = (min(each) for each in zip(*copied, strict=True))
                stream, stream_processor, _ = (min(each) for each in zip(*streamed, strict=True))
                peak = max(int(above) for _, _, above in streamed)
                found = Stream(stream, copy, stream_processor, copy_processor, peak)
                streams.append(found.row(nbytes, max_mb))
            running.call("save", files)
        finally:
            running.close()
        for number in (1, 2, 4):
            running = Ranks(partial(Model, mib, meta=True), number, cache)
            try:
                seconds, above, shards = map(max, zip(*running.call("load", files), strict=True))
            finally:
                running.close()
            row = f"{shards / MIB:.0f} | {above / MIB:.0f} | {(above - shards) / MIB:.0f}"
            loads.append(f"| {number} | {row} | {nbytes / seconds / 1e9:.1f} |")
    return [*streams, "", *loads]


class Model:
    """A rank of a model of ``mib`` MiB, all of it matrices."""

    def __init__(
        self, mib: int, rank: int, world_size: int, store: str, meta: bool = False
    ) -> None:
        join(rank, world_size, store)
        torch.manual_seed(0)
        self._model = nn.Sequential()
        for _ in range(mib * MIB // (4 * _WIDTH**2)):
            with torch.device("meta" if meta else "cpu"):
                layer = nn.Linear(_WIDTH, _WIDTH, bias=False)
            self._model.append(deepcompile_zero3.fully_shard(layer))
        deepcompile_zero3.fully_shard(self._model)

    def is_equal(self) -> bool:
        """Returns whether a stream has the bits of ``full_tensor()``."""
        return all(
            torch.equal(
                tensor.view(torch.int32),
                self._model.get_parameter(name).full_tensor().view(torch.int32),  # type: ignore
            )
            for name, tensor in stream_full_parameters(self._model)
        )

    def stream(self, max_mb: float) -> tuple[float, float, float]:
        """Returns seconds of a stream, of the processor, and the peak above rest in bytes."""
        rest = memory_of_this_process().resident
        dist.barrier()

        def all_of_them() -> None:
            for _ in stream_full_parameters(self._model, max_mb=max_mb):
                pass

        processor = time.thread_time()
        seconds = _seconds(all_of_them)
        processor = time.thread_time() - processor
        return seconds, processor, memory_of_this_process().peak - rest

    def copy(self, max_mb: float) -> tuple[float, float]:
        """Returns seconds in which this rank copies its shards, and those of the processor."""
        shards = self._shards()
        places = [torch.ones_like(each) for each in shards[: 3 * self._in_a_bucket(max_mb)]]
        dist.barrier()

        def all_of_them() -> None:
            for index, shard in enumerate(shards):
                places[index % len(places)].copy_(shard)

        processor = time.thread_time()
        seconds = _seconds(all_of_them)
        return seconds, time.thread_time() - processor

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

        seconds = _seconds(all_of_it)
        peak = memory_of_this_process().peak - rest
        return seconds, peak, sum(each.nbytes for each in self._shards())

    def _shards(self) -> list[torch.Tensor]:
        found = []
        for parameter in self._model.parameters():
            assert isinstance(parameter, DTensor)
            found.append(parameter.to_local().detach())
        return found

    def _in_a_bucket(self, max_mb: float) -> int:
        return max(1, int(max_mb * 2 / 3 * MIB / (4 * _WIDTH**2)))


def _slowest(of_ranks: list[tuple[float, ...]]) -> list[float]:
    """Returns the largest of each number over the ranks."""
    return [max(numbers) for numbers in zip(*of_ranks, strict=True)]


def _seconds(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
