"""The buckets in which a stream moves parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepcompile_zero3.features.streaming.pieces import Entry

_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Bucket:
    """Consecutive parameters that travel together.

    Attributes:
        entries: the parameters.
        offsets: offset in bytes of each full tensor in the bucket.
        nbytes: size of all full tensors.
        largest: size of the largest bucket of the stream.
        most_bytes: memory that the buckets of the stream may take together, at least two of the
            largest.
    """

    entries: Sequence[Entry]
    offsets: Sequence[int]
    nbytes: int
    largest: int
    most_bytes: int

    def tensors_in(self, memory: memoryview) -> list[torch.Tensor]:
        """Returns the full tensors as views of ``memory``, which has the bucket."""
        return [
            tensor_in(memory, entry.dtype, entry.shape, offset)
            for entry, offset in zip(self.entries, self.offsets, strict=True)
        ]


def tensor_in(
    memory: memoryview, dtype: torch.dtype, shape: Sequence[int], offset: int
) -> torch.Tensor:
    """Returns a tensor of ``memory``, which lives as long as the tensor does."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def buckets_of(entries: Sequence[Entry], max_bytes: float, most: float = math.inf) -> list[Bucket]:
    """Returns ``entries`` in buckets, of which three take at most twice ``max_bytes``.

    An entry that is larger has a bucket of its own.

    Args:
        entries: parameters, in order.
        max_bytes: half of the memory that buckets may take.
        most: size of a bucket beyond which no other entry joins it.
    """
    limit = int(min(max_bytes * 2 / 3, most))
    parts: list[list[Entry]] = []
    size = 0
    for entry in entries:
        nbytes = _aligned(entry.nbytes)
        if not parts or size + nbytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += nbytes
    ends = [max(sum(_aligned(each.nbytes) for each in part), _ALIGNMENT) for part in parts]
    largest = max(ends, default=0)
    most_bytes = int(2 * max(max_bytes, largest))
    buckets = []
    for part, end in zip(parts, ends, strict=True):
        offsets = [0]
        for entry in part[:-1]:
            offsets.append(offsets[-1] + _aligned(entry.nbytes))
        buckets.append(Bucket(part, offsets, end, largest, most_bytes))
    return buckets


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
