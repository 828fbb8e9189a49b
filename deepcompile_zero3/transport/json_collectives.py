"""Exchanges plain values between ranks, as JSON. Nothing is unpickled."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.guides import Guide


def all_gather_json(what: str, value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks of ``group``, by rank, as JSON decodes them. Collective.

    Raises:
        Zero3Error: a rank has not come, or makes another call than ``what``.
    """
    try:
        answers = _gather([what, value], group)
    except RuntimeError as error:
        raise Zero3Error(
            f"{what}: ranks {dist.get_process_group_ranks(group)} could not tell each other what "
            "they have. One of them has raised or stopped (read its output first), or runs "
            f"something else: all ranks make the same calls. Caused by: {error}"
        ) from error

    others = {rank: other for rank, (other, _) in enumerate(answers) if other != what}
    if others:
        raise Zero3Error(
            f"ranks make different calls: {what} here, and {others} by rank in the group. All "
            "ranks make the same calls, in one order"
        )
    return [theirs for _, theirs in answers]


def all_gather_alike(what: str, value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks, as :func:`all_gather_json` does. Collective.

    Ranks exchange a hash, and the values only if hashes differ.
    """
    text = json.dumps(value)
    hashes = all_gather_json(what, hashlib.sha256(text.encode()).hexdigest(), group)
    if len({*hashes}) == 1:
        return [json.loads(text)] * len(hashes)
    return all_gather_json(what, value, group)


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    device = torch_internals.device_of_objects(group)
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    world_size = dist.get_world_size(group)
    sizes = torch.zeros(world_size, 1, dtype=torch.int64, device=device)
    dist.all_gather(list(sizes), torch.tensor([mine.numel()], device=device), group=group)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
    padded[: mine.numel()] = mine
    rows = torch.zeros(world_size, padded.numel(), dtype=torch.uint8, device=device)
    dist.all_gather(list(rows), padded.to(device), group=group)
    texts = bytearray(rows.numel())
    torch.frombuffer(texts, dtype=torch.uint8).copy_(rows.flatten())
    starts = range(0, rows.numel(), padded.numel())
    ends = [start + size for start, size in zip(starts, sizes.flatten().tolist(), strict=True)]
    return [json.loads(texts[start:end]) for start, end in zip(starts, ends, strict=True)]


def all_gather_lines(
    what: str, lines: Sequence[str], groups: Sequence[dist.ProcessGroup]
) -> list[str]:
    """Returns the ``lines`` of all ranks of a mesh, each once. Collective over its ``groups``.

    To report on meshes of several sizes, go from small to large and pass the result for one mesh
    among the lines of the next.
    """
    for group in groups:  # first the shards' group, then the replicas': these get complete lines
        of_ranks = all_gather_json(what, lines, group)
        lines = list(dict.fromkeys(each for theirs in of_ranks for each in theirs))
    return list(lines)


def shorten(lines: Sequence[str]) -> str:
    """Returns the first of ``lines``, and how many more there are."""
    more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
    return "; ".join(lines[:8]) + more


def check_all_alike(
    what: str, described: Sequence[str], group: dist.ProcessGroup, *, remedy: str
) -> None:
    """Raises Zero3Error unless all ranks of ``group`` describe their parameters alike. Collective.

    Args:
        what: the call that all ranks make.
        described: for each parameter, a description.
        group: process group of the ranks.
        remedy: end of the message.
    """
    for other, theirs in enumerate(all_gather_alike(what, described, group)):
        if theirs == described:
            continue
        for position, (one, another) in enumerate(itertools.zip_longest(described, theirs)):
            if one != another:
                raise Zero3Error(
                    f"ranks disagree on the module's parameter {position}: it is {one} on rank "
                    f"{dist.get_rank(group)} and {another} on rank {other}; {remedy}. "
                    f"See {Guide.DISAGREEMENT}"
                )
