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
from deepcompile_zero3.transport.rank_names import rank_names

_CODE_BITS = 24


def all_gather_json(what: str, value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks of ``group``, by rank, as JSON decodes them. Collective.

    Raises:
        Zero3Error: a rank has not come, or makes another call than ``what``.
    """
    return all_gather_codes(what, None, value, group)


def all_gather_codes(
    what: str, code: int | None, value: Any, group: dist.ProcessGroup
) -> list[Any]:
    """Returns what each rank says: a code, or else a value as JSON decodes it. Collective.

    Ranks exchange one number each if all have codes, in half of the time.

    Args:
        what: see :func:`all_gather_json`.
        code: a number below 2**24 that says enough, or None.
        value: what this rank says without one.
        group: see :func:`all_gather_json`.

    Raises:
        Zero3Error: see :func:`all_gather_json`.
    """
    mine = _hash_of(what)
    try:
        answers = _gather(None if code is None else mine << _CODE_BITS | code, [what, value], group)
    except RuntimeError as error:
        raise Zero3Error(
            f"{what}: ranks {dist.get_process_group_ranks(group)} could not tell each other what "
            "they have. One of them has raised or stopped (read its output first), or runs "
            f"something else: all ranks make the same calls. Caused by: {error}"
        ) from error

    others: dict[int, str] = {}
    said: list[Any] = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, int):
            said.append(answer & (1 << _CODE_BITS) - 1)
            if answer >> _CODE_BITS != mine:
                others[rank] = "another step of such a call"
        else:
            other, theirs = answer
            said.append(theirs)
            if other != what:
                others[rank] = other
    if others:
        names = rank_names(group)
        by_rank = {names[rank]: call for rank, call in others.items()}
        raise Zero3Error(
            f"ranks make different calls: {what} here, and {by_rank} by rank. All ranks make the "
            "same calls, in one order"
        )
    return said


def all_gather_alike(what: str, value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks, as :func:`all_gather_json` does. Collective.

    Ranks exchange a hash, and the values only if hashes differ.
    """
    text = json.dumps(value)
    hashes = all_gather_json(what, hashlib.sha256(text.encode()).hexdigest(), group)
    if len({*hashes}) == 1:
        return [json.loads(text)] * len(hashes)
    return all_gather_json(what, value, group)


def _gather(code: int | None, value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns each rank's ``code``, or its ``value`` if it has none.

    The first exchange is of codes, below zero, or of the sizes of values.
    """
    device = torch_internals.device_of_objects(group)
    text = b"" if code is not None else json.dumps(value).encode()
    first = len(text) if code is None else -1 - code
    world_size = dist.get_world_size(group)
    firsts = torch.zeros(world_size, 1, dtype=torch.int64, device=device)
    dist.all_gather(list(firsts), torch.tensor([first], device=device), group=group)
    sizes = [max(each, 0) for each in firsts.flatten().tolist()]
    answers: list[Any] = [-1 - each for each in firsts.flatten().tolist()]
    if not any(sizes):
        return answers
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(text)] = torch.frombuffer(bytearray(text or b"0"), dtype=torch.uint8)[: len(text)]
    rows = torch.zeros(world_size, padded.numel(), dtype=torch.uint8, device=device)
    dist.all_gather(list(rows), padded.to(device), group=group)
    texts = bytearray(rows.numel())
    torch.frombuffer(texts, dtype=torch.uint8).copy_(rows.flatten())
    for rank, size in enumerate(sizes):
        if size:
            start = rank * padded.numel()
            answers[rank] = json.loads(texts[start : start + size])
    return answers


def _hash_of(text: str) -> int:
    """Returns a number of 32 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


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
        described: for each parameter, its name and facts, with ``"; "`` between them.
        group: process group of the ranks.
        remedy: end of the message.
    """
    names = rank_names(group)
    for other, theirs in zip(names, all_gather_alike(what, described, group), strict=True):
        if theirs == described:
            continue
        for position, (one, another) in enumerate(itertools.zip_longest(described, theirs)):
            if one != another:
                mine, others = _differing(one, another)
                raise Zero3Error(
                    f"ranks disagree on the module's parameter {position}: it is {mine} on rank "
                    f"{names[dist.get_rank(group)]} and {others} on rank {other}; {remedy}. "
                    f"See {Guide.DISAGREEMENT}"
                )


def _differing(one: str | None, another: str | None) -> tuple[str, str]:
    """Returns the two names of a parameter, or its name with the facts that differ."""
    (name, *facts), (other_name, *other_facts) = (
        ("missing" if each is None else each).split("; ") for each in (one, another)
    )
    if name != other_name:
        return name, other_name
    facts, other_facts = (
        [fact for fact in mine if fact not in theirs]
        for mine, theirs in ((facts, other_facts), (other_facts, facts))
    )
    return ", ".join([name, *facts]), ", ".join([name, *other_facts])
