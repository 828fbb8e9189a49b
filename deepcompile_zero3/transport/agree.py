"""What ranks tell each other beside tensors: plain values, as JSON. Nothing is unpickled."""

import json
from typing import Any

import torch
import torch.distributed as dist

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error


def gather(what: str, value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks of ``group``, by rank, each what JSON makes of it. Collective.

    Raises:
        Zero3Error: a rank has not come, or is somewhere else than in ``what``.
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
    return [
        json.loads(bytes(row[:size].tolist()))
        for row, size in zip(rows.cpu(), sizes.flatten().tolist(), strict=True)
    ]
