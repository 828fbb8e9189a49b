"""A warning of parameters that each rank trains by itself, beside shards."""

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from deepcompile_zero3.guides import Guide
from deepcompile_zero3.sharding.model import live_shards
from deepcompile_zero3.sharding.setup.replaced_parameters import not_ignored
from deepcompile_zero3.transport.json_collectives import shorten

# What each optimizer stepped beside how many shards, when it was looked at; None once it was told.
_seen: "weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, frozenset[int]] | None]" = (
    weakref.WeakKeyDictionary()
)


def warn_of_unsharded(
    optimizer: torch.optim.Optimizer, shards: Sequence[DTensor], others: Sequence[torch.Tensor]
) -> None:
    """Warns once if an optimizer steps shards, and parameters whose gradients nobody reduces.

    Args:
        optimizer: an optimizer that is about to step.
        shards: its DTensors that have gradients.
        others: its other parameters that have gradients.
    """
    looked_at = len(shards), frozenset(map(id, others))
    if _seen.get(optimizer, ()) in (looked_at, None):
        return
    _seen[optimizer] = looked_at
    ours = live_shards()
    apart = not_ignored(others)
    if not apart or not any(
        (sharded := ours.get(id(shard))) and sharded.layout.ranks.mesh.size() > 1
        for shard in shards
    ):
        return
    _seen[optimizer] = None
    shapes = shorten([str(list(each.shape)) for each in apart])
    warnings.warn(
        f"zero3: the {type(optimizer).__name__} steps shards, and {len(apart)} of the parameters "
        f"that fully_shard has not sharded, of shapes {shapes}. Each rank trains its own of these, "
        "by the gradients of its own data. Call fully_shard on the whole model too, once it has "
        "all of its modules. Name parameters that are meant to differ, or whose gradients you "
        f"reduce, in ignored_params of fully_shard. See {Guide.SILENT}",
        stacklevel=7,  # the caller of optimizer.step()
    )
