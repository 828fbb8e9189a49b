"""``save_safetensors``: all ranks write files at once, each its own part of each parameter."""

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.streaming.arguments import (
    check_dtype_argument,
    check_megabytes,
    group_of_ranks,
    on_each_rank,
)
from deepcompile_zero3.features.streaming.pieces import Box, Entry, entries_of
from deepcompile_zero3.features.streaming.safetensors_format import (
    INDEX,
    Place,
    check_dtype,
    file_name,
    header_of,
)

_WHAT = "save_safetensors"
_BLOCK_BYTES = 16 << 20  # of what is cast, or copied from another device, at once
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_TEMPORARY = re.compile(rf"\.{_OURS.pattern}\.writing")


class _File(NamedTuple):
    """A file to write.

    Attributes:
        name: its name in the end.
        head: its first bytes.
        entries: what it has.
        places: where it has that.
        nbytes: its size.
    """

    name: str
    head: bytes
    entries: Sequence[Entry]
    places: dict[str, Place]
    nbytes: int

    @property
    def temporary(self) -> str:
        """Its name until all ranks have written."""
        return f".{self.name}.writing"


@torch_internals.disable_dynamo
@torch.no_grad()
def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike,
    *,
    max_shard_mb: float = 5000,
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Saves a sharded model as safetensors files, which ``from_pretrained`` reads. Collective.

    All ranks write at once, each the elements that it has, at their places in the files. Nothing is
    gathered, and beyond its shards a rank needs 16 MiB, or nothing where neither dtype nor device
    change. Of replicas, one writes.

    The files have the model's parameters and persistent buffers, by the names of the model without
    ``torch.compile`` and ``checkpoint_wrapper``. Tied ones come once, under the first of their
    names in ``model.named_parameters()``, as ``save_pretrained`` writes them. A single file is
    ``model.safetensors``. Several are ``model-00001-of-00002.safetensors`` and so on, and
    ``model.safetensors.index.json`` says which has what. Save the config beside them, on one rank:
    ``model.config.save_pretrained(folder)``.

    Files have temporary names until all ranks have written, and are on the disk when they get their
    own. A rank or a disk that fails leaves an earlier model in ``folder`` as it was. An
    interruption while several files are renamed leaves no index, so that nothing loads a mixture.
    Files of an earlier model with other names are removed in the end.

    Args:
        model: a model with any layouts: rows or other dimensions of ZeRO-3, tensor parallelism,
            replicas, owners, shards that are offloaded, and parameters that are not sharded.
            Values of these and of buffers are the first rank's.
        folder: a folder that all ranks see. It is made if it does not exist.
        max_shard_mb: size in MiB of a file that a further tensor may not exceed.
        dtype: a floating dtype to which floating tensors are cast, or None for their own.
        group: process group of all ranks that share the model; None means all ranks of the job.

    Raises:
        ValueError, TypeError: an argument is wrong.
        Zero3Error: on all ranks: a rank cannot write (the message has its number and the reason),
            ranks disagree on model or arguments, a parameter is a tensor subclass or on the meta
            device, or its dtype is none of safetensors'.
    """
    nbytes = check_megabytes("max_shard_mb", max_shard_mb)
    check_dtype_argument(dtype)
    folder = os.fsdecode(folder)
    ranks = group_of_ranks(_WHAT, group)
    arguments = [folder, max_shard_mb, str(dtype)]
    entries = entries_of(_WHAT, model, ranks, dtype=dtype, buffers=True, arguments=arguments)
    for entry in entries:
        check_dtype(entry.name, entry.dtype)
    files = _files(entries, nbytes)
    rank = dist.get_rank(ranks)
    is_first = rank == 0
    try:
        on_each_rank(_WHAT, lambda: _create(folder, files) if is_first else None, ranks)
        on_each_rank(_WHAT, lambda: _write(folder, files, rank), ranks)
        on_each_rank(_WHAT, lambda: _rename(folder, files) if is_first else None, ranks)
    except BaseException:
        if is_first:
            for file in files:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, file.temporary))
        raise


def _files(entries: Sequence[Entry], nbytes: float) -> list[_File]:
    """Returns the files that have ``entries`` in their order, of ``nbytes`` or one entry each."""
    parts: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if parts[-1] and size + entry.nbytes > nbytes:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.nbytes
    files = []
    for index, part in enumerate(parts):
        head, places, total = header_of((e.name, e.dtype, e.shape) for e in part)
        files.append(_File(file_name(index, len(parts)), head, part, places, total))
    return files


def _create(folder: str, files: Sequence[_File]) -> None:
    """Makes the files under their temporary names, with all the space that they need."""
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):  # of a save that was interrupted
            os.unlink(os.path.join(folder, name))
    for file in files:
        path = os.path.join(folder, file.temporary)
        with open(path, "xb", buffering=0) as opened:
            os.posix_fallocate(opened.fileno(), 0, file.nbytes)  # a full disk fails here
            _write_all(opened.fileno(), memoryview(file.head), 0)


def _write(folder: str, files: Sequence[_File], rank: int) -> None:
    """Writes this rank's boxes."""
    for file in files:
        path = os.path.join(folder, file.temporary)
        try:
            opened = os.open(path, os.O_WRONLY)
        except FileNotFoundError:
            raise Zero3Error(
                f"it does not see {path}, which rank 0 has made: pass a folder on a file system "
                "that all ranks share"
            ) from None
        try:
            for entry in file.entries:
                for source, box in entry.sources:
                    if source == rank:
                        for offset, data in _runs(entry, box, file.places[entry.name]):
                            _write_all(opened, data, offset)
            os.fsync(opened)
        finally:
            os.close(opened)


def _runs(entry: Entry, box: Box, place: Place) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of a box in runs, and each run's offset in the file."""
    shape, local = entry.shape, entry.local.view(box.sizes)
    narrowed = [dim for dim, size in enumerate(box.sizes) if size != shape[dim]]
    last = narrowed[-1] if narrowed else 0  # what follows this dimension is contiguous in the file
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if not shape:
        yield place.begin, _bytes_of(local, entry.dtype)
        return
    rows = max(1, _BLOCK_BYTES * box.sizes[0] // (box.numel * entry.dtype.itemsize))
    for first in range(0, box.sizes[0], rows):
        block = local[first : first + rows]
        data = _bytes_of(block, entry.dtype)
        # Runs of the file, in the order of their bytes in the block.
        outer = [range(size) for size in block.shape[:last]]
        run = math.prod(block.shape[last:]) * entry.dtype.itemsize
        for number, index in enumerate(itertools.product(*outer)):
            at = [*index, *(0 for _ in shape[last:])]
            at[0] += first
            element = sum(
                (i + offset) * stride
                for i, offset, stride in zip(at, box.offsets, strides, strict=True)
            )
            start = number * run
            yield place.begin + element * entry.dtype.itemsize, data[start : start + run]


def _bytes_of(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview:
    cast = tensor.to("cpu", dtype).resolve_conj().resolve_neg().contiguous().view(-1)
    return memoryview(cast.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _rename(folder: str, files: Sequence[_File]) -> None:
    """Gives the files their names, and removes those of an earlier model."""

    def path(name: str) -> str:
        return os.path.join(folder, name)

    def remove(name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path(name))

    several = len(files) > 1
    if several:
        remove(INDEX)  # until the new one is there, nothing takes old files and new for one model
    for file in files:
        os.replace(path(file.temporary), path(file.name))
    names = {file.name for file in files}
    for name in os.listdir(folder):
        if _OURS.fullmatch(name) and name not in names:
            remove(name)
    if several:
        weight_map = {entry.name: file.name for file in files for entry in file.entries}
        total = sum(entry.nbytes for file in files for entry in file.entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with open(path(f".{INDEX}.writing"), "w") as opened:
            json.dump(index, opened, indent=2)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(path(f".{INDEX}.writing"), path(INDEX))
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
