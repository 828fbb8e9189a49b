"""What ranks tell each other beside tensors: plain values, as JSON. Nothing is unpickled."""

import json
from typing import Any

import torch
import torch.distributed as dist

from deepcompile_zero3.errors import Zero3Error


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks of ``group``, by rank, each what JSON makes of it. Collective.

    Raises:
        Zero3Error: a rank has not come.
    """
    try:
        return _gather(value, group)
    except RuntimeError as error:
        raise Zero3Error(
            "ranks could not tell each other what they have: one of them has stopped, or runs "
            f"something else; all make the same calls. {error}"
        ) from error


def _gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    world_size = dist.get_world_size(group)
    sizes = torch.zeros(world_size, 1, dtype=torch.int64, device=device)
    dist.all_gather(list(sizes), torch.tensor([mine.numel()], device=device), group=group)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    rows = torch.zeros(world_size, padded.numel(), dtype=torch.uint8, device=device)
    dist.all_gather(list(rows), padded.to(device), group=group)
    return [
        json.loads(bytes(row[:size].tolist()))
        for row, size in zip(rows.cpu(), sizes.flatten().tolist(), strict=True)
    ]
