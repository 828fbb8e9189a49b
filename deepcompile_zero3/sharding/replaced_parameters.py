"""Plain parameters that ``fully_shard`` has replaced with shards, or was told to leave.

Optimizers that were built before may still have the former, and tied modules that are sharded
later.
"""

import torch

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.parameter import ShardedParameter

# Attributes of such parameters.
_SHARDED_AS = "_zero3_sharded_as"
_IGNORED = "_zero3_ignored"


def ignore(parameter: torch.Tensor) -> None:
    """Notes that ``fully_shard`` leaves ``parameter`` as it is."""
    setattr(parameter, _IGNORED, True)


def is_ignored(parameter: torch.Tensor) -> bool:
    """Whether a call of ``fully_shard`` has ``parameter`` among its ``ignored_params``."""
    return hasattr(parameter, _IGNORED)


def replace(parameter: torch.Tensor, sharded: ShardedParameter) -> None:
    """Notes that ``sharded`` has replaced ``parameter``."""
    setattr(parameter, _SHARDED_AS, sharded)


def sharded_as(tensor: torch.Tensor) -> ShardedParameter | None:
    """Returns the sharded parameter that has replaced ``tensor``, or None."""
    return getattr(tensor, _SHARDED_AS, None)


def refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raises Zero3Error if ``optimizer`` has a parameter and not its shard, which has a gradient.

    The step would silently leave the shard as it is. A parameter that has a gradient too is not
    refused: a tied module that is not sharded may use it.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    there = {id(parameter) for parameter in parameters}
    missed = []
    for parameter in parameters:
        sharded = sharded_as(parameter)
        if sharded is None or sharded.model is None or parameter.grad is not None:
            continue
        shard = sharded.registered.latest
        if shard.grad is not None and id(shard) not in there:
            missed.append(sharded.fqn)
    if missed:
        others = f" and {len(missed) - 1} others" if len(missed) > 1 else ""
        raise Zero3Error(
            f"the {type(optimizer).__name__} has '{missed[0]}'{others} from before fully_shard, "
            "which has put a shard in the parameter's place: the shard gets the gradients. Build "
            "the optimizer after the last fully_shard, of the parameters that the model has then"
        )
