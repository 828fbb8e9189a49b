"""Plain parameters that ``fully_shard`` has replaced with shards, or was told to leave.

Optimizers that were built before may still have the former, and tied modules that are sharded
later.
"""

import weakref
from collections.abc import Iterable, Set

import torch
from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.parameter import ShardedParameter

_SHARDED_AS = "_zero3_sharded_as"  # attribute of a parameter that was replaced
_IGNORED = "_zero3_ignored"  # attribute of a parameter that is left
_ignored_names: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()


def ignore(parameters: Set[nn.Parameter], modules: Iterable[nn.Module]) -> None:
    """Notes that ``fully_shard``, called on ``modules``, leaves ``parameters`` as they are."""
    for parameter in parameters:
        setattr(parameter, _IGNORED, True)
    for module in (each for root in modules for each in root.modules()):
        names = {name for name, each in module._parameters.items() if each in parameters}
        if names:  # torch may put others in their places, such as those of `to_empty`
            _ignored_names.setdefault(module, set()).update(names)


def not_ignored(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns those of ``parameters`` that no call of ``fully_shard`` was told to leave."""
    known = {id(m._parameters.get(name)) for m, names in _ignored_names.items() for name in names}
    return [each for each in parameters if id(each) not in known and not hasattr(each, _IGNORED)]


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
