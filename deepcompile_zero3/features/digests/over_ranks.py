"""Adds up the sums that ranks have, by name."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.transport.json_collectives import all_gather_json


class Sum(NamedTuple):
    """A rank's part of the sum over a tensor's elements.

    Attributes:
        value: the sum as an int64.
        copy: the lowest of the ranks that have the tensor together, or None if each has all of it.
    """

    value: int
    copy: int | None


def add_up(mine: Mapping[str, Sum], group: dist.ProcessGroup | None) -> dict[str, int]:
    """Returns the sum over the elements of each full tensor, as an int64. Collective.

    Copies of a tensor on several ranks, or on several sets of ranks, count once if they are equal.
    If they differ, each that is different counts.

    Args:
        mine: this rank's sums by name. Ranks may differ in names.
        group: the ranks; None means this one.
    """
    if group is None or group.size() == 1:
        return {name: part.value for name, part in mine.items()}
    alike = "\n".join(f"{name} {part.copy}" for name, part in mine.items())
    values = [part.value for part in mine.values()]
    # Ranks first see whether they have the same names, and then whether whole tensors are equal.
    if _equal([number_of(alike), len(mine)], group) and _equal(
        [part.value for part in mine.values() if part.copy is None], group
    ):
        summed = _all_reduce(values, dist.ReduceOp.SUM, group)
        return {
            name: part.value if part.copy is None else total
            for (name, part), total in zip(mine.items(), summed, strict=True)
        }
    copies: dict[str, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
    for rank, theirs in enumerate(all_gather_json("training_digest", mine, group)):
        for name, (value, copy) in theirs.items():
            copies[name][f"rank {rank}" if copy is None else copy] += value
    return {name: sum({_wrapped(v) for v in found.values()}) for name, found in copies.items()}


def number_of(text: str) -> int:
    """Returns a hash of ``text`` as an int64, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def as_int64(value: int) -> int:
    """Returns the int64 that equals ``value`` modulo 2**64."""
    return _wrapped(value + (1 << 63)) - (1 << 63)


def _wrapped(value: int) -> int:
    """Returns ``value`` modulo 2**64."""
    return value & (1 << 64) - 1


def _equal(values: list[int], group: dist.ProcessGroup) -> bool:
    """Returns whether all ranks have the same ``values``. Collective."""
    largest = _all_reduce(values + [~value for value in values], dist.ReduceOp.MAX, group)
    return all(
        high == ~low
        for high, low in zip(largest[: len(values)], largest[len(values) :], strict=True)
    )


def _all_reduce(values: list[int], op: Any, group: dist.ProcessGroup) -> list[int]:
    tensor = torch.tensor(
        values, dtype=torch.int64, device=torch_internals.device_of_objects(group)
    )
    dist.all_reduce(tensor, op, group)
    return tensor.tolist()
