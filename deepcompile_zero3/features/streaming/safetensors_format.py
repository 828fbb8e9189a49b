"""The format of safetensors files: a header of JSON, then each tensor's bytes, in rows.

::

    8 bytes     length of the header, little-endian
    header      {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    bytes       of all tensors; offsets count from here

A range of rows of a tensor is a range of bytes, so that ranks write and read their own parts. See
https://huggingface.co/docs/safetensors.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepcompile_zero3.errors import Zero3Error

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Place(NamedTuple):
    """The place of a tensor in a file.

    Attributes:
        dtype: its dtype in the file.
        shape: its shape.
        begin: offset of its first byte in the file.
        nbytes: its size in bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def file_name(index: int, number: int) -> str:
    """Returns the name of one of ``number`` files, as transformers gives it."""
    return ONE_FILE if number == 1 else f"model-{index + 1:05d}-of-{number:05d}.safetensors"


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises Zero3Error if safetensors files have no such dtype."""
    if dtype not in _NAMES:
        remedy = (
            "pass dtype=, such as torch.float32"
            if dtype.is_floating_point
            else "convert it, or if it is a buffer, register it with persistent=False"
        )
        raise Zero3Error(
            f"'{name}' is {dtype}, which safetensors files do not have: {remedy}. They have "
            f"{', '.join(map(str, _NAMES))}"
        )


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
) -> tuple[bytes, dict[str, Place], int]:
    """Returns the first bytes of a file, the places of its tensors, and the file's size.

    Args:
        tensors: name, dtype and shape of each.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Wider elements first, so that each tensor begins at a multiple of its own.
    ordered = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    end = 0
    for name, dtype, shape in ordered:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, _places(header, len(head)), len(head) + end


class MappedFile:
    """A safetensors file, mapped to memory: pages are read when they are first used.

    Attributes:
        path: its path.
        places: places of its tensors, by name.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise Zero3Error(f"{path} is no safetensors file, or was cut off: it has {size} B")
            try:
                self.places = _places(json.loads(file.read(length)), 8 + length)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise Zero3Error(f"{path} is no safetensors file: {error}") from error
            # A private map, since torch warns of memory that it cannot write to. Nobody writes.
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        for name, place in self.places.items():
            if place.begin + place.nbytes > size:
                raise Zero3Error(
                    f"{path} was cut off: '{name}' ends at byte {place.begin + place.nbytes} of "
                    f"{size}"
                )
        end = 8 + length
        for name, place in sorted(self.places.items(), key=lambda item: item[1][2:]):
            if place.begin != end:
                raise Zero3Error(
                    f"{path} is no safetensors file: '{name}' begins at byte {place.begin}, and "
                    f"what is before it ends at {end}"
                )
            end += place.nbytes
        if end != size:
            raise Zero3Error(
                f"{path} is no safetensors file: it has {size} B, and its tensors end at byte {end}"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a tensor over the file's pages; to copy a part of it reads that part alone."""
        place = self.places[name]
        if not place.nbytes:
            return torch.empty(place.shape, dtype=place.dtype)
        count = place.nbytes // place.dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=place.dtype, count=count, offset=place.begin)
        return flat.view(place.shape)

    def drop_pages(self) -> None:
        """Takes all pages that were read out of this process's memory."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _places(header: Mapping[str, Any], base: int) -> dict[str, Place]:
    places = {}
    for name, described in header.items():
        if name == "__metadata__":
            continue
        if described["dtype"] not in _DTYPES:
            raise ValueError(f"'{name}' is {described['dtype']}, which is no dtype of torch")
        dtype, shape = _DTYPES[described["dtype"]], tuple(described["shape"])
        begin, end = described["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError(f"'{name}' has shape {list(shape)} and bytes {begin} to {end}")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"'{name}' has shape {list(shape)} and {dtype}, but bytes {begin} to {end}"
            )
        places[name] = Place(dtype, shape, base + begin, end - begin)
    return places
