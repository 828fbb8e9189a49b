"""A warning of parameters that each rank trains by itself, beside shards."""

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from deepcompile_zero3.guides import Guide
from deepcompile_zero3.sharding.model import live_models
from deepcompile_zero3.sharding.replaced_parameters import is_ignored
from deepcompile_zero3.transport.json_collectives import shorten

# How many parameters beside shards each optimizer had when it was looked at.
_seen: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()


def warn_of_unsharded(
    optimizer: torch.optim.Optimizer, shards: Sequence[DTensor], others: Sequence[torch.Tensor]
) -> None:
    """Warns once if an optimizer steps parameters beside shards whose gradients nobody reduces.

    Args:
        optimizer: an optimizer that steps.
        shards: its DTensors that have gradients.
        others: its other parameters that have gradients.
    """
    if _seen.get(optimizer) == len(others):
        return
    _seen[optimizer] = len(others)
    ours = {
        id(parameter.registered.latest)
        for model in live_models()
        for parameter in model.parameters
        if parameter.layout.ranks.mesh.size() > 1
    }
    apart = [each for each in others if not is_ignored(each)]
    if not apart or ours.isdisjoint(map(id, shards)):
        return
    shapes = shorten([str(list(each.shape)) for each in apart])
    warnings.warn(
        f"zero3: the {type(optimizer).__name__} steps {len(apart)} parameters beside shards that "
        f"fully_shard was not called on, of shapes {shapes}: each rank trains its own, by the "
        "gradients of its own data. Call fully_shard on the whole model too, once it has all of "
        "its modules. Name parameters that are meant to differ, or whose gradients you reduce, in "
        f"ignored_params of fully_shard. See {Guide.SILENT}",
        stacklevel=5,  # of the step
    )
