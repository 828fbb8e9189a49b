"""Counts steps of optimizers in the versions of DTensors, on all ranks alike.

The runtime gathers a shard again if the version of its DTensor, or that of its local tensor, has
changed. Ranks gather together, so all of them have to notice a step. Fused kernels, and foreach
kernels over DTensors, write without counting. Others count on some ranks only: a rank steps small
shards in a flat tensor, unless they have too few elements.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook as register_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook as register_pre_hook

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.sharding.setup.replaced_parameters import refuse_replaced, sharded_as
from deepcompile_zero3.torch_internals.optimizers import is_stepping, step_hooks

# Attribute of an optimizer whose step refuses replaced parameters itself, before it puts other
# tensors in the place of shards: hooks would not find these.
REFUSES_REPLACED = "_zero3_refuses_replaced"

# What features look at before a step: its optimizer, those of its DTensors that have gradients, and
# those of its other parameters that have some. Not called if either is empty.
LOOKS: list[Callable[[torch.optim.Optimizer, list[DTensor], list[torch.Tensor]], None]] = []


class TakesSteps(NamedTuple):
    """A feature that takes steps of optimizers in their place.

    Attributes:
        may_take: says whether it may take those of an optimizer. Its closure is called first.
        take: takes a step, and returns True; or does nothing, and returns False.
    """

    may_take: Callable[[torch.optim.Optimizer], bool]
    take: Callable[[torch.optim.Optimizer], bool]


# The first that may take a step is asked to, and no other.
TAKERS: list[TakesSteps] = []

_PACKAGE = __name__.partition(".")[0]

_handles: list[Any] = []  # of the hooks, while there are owners
_owners = 0


def count_steps_while_alive(owner: object) -> None:
    """Counts the steps of all optimizers as long as ``owner``, or another owner, lives."""
    global _owners
    _owners += 1
    if not _handles:
        # Before a step too, since one that raises may have changed some parameters.
        _handles.extend((register_pre_hook(_before_step), register_post_hook(_after_step)))
    weakref.finalize(owner, _forget_owner).atexit = False


def _forget_owner() -> None:
    global _owners
    _owners -= 1
    _remove_unneeded_hooks()


def _remove_unneeded_hooks() -> None:
    """Removes the hooks if there is no owner, at a later collection if an optimizer steps now.

    The last owner may be collected in any hook, and torch goes through all hooks there.
    """
    if _owners:
        return
    if is_stepping():
        garbage = _Garbage()
        weakref.finalize(garbage, _remove_unneeded_hooks).atexit = False
        garbage.itself = garbage
        return
    while _handles:
        _handles.pop().remove()


class _Garbage:
    """An object in a cycle, which only the next garbage collection frees."""

    itself: "_Garbage"


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether hooks of others see the steps of ``optimizer``."""
    modules = (getattr(hook, "__module__", None) or "" for hook in step_hooks(optimizer))
    return not all(module.startswith(f"{_PACKAGE}.") for module in modules)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Counts writes, shows features what steps, and lets them take the step."""
    if torch.compiler.is_compiling():  # graphs have the optimizer's own tensors
        _look(optimizer)
        return None
    taker = _taker_of(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if taker is not None and closure is not None:
        with torch.enable_grad():
            loss = closure()
        args, kwargs = (optimizer, lambda: loss), {**kwargs}
        kwargs.pop("closure", None)
        taker = _taker_of(optimizer)  # the closure may have registered hooks
    if _look(optimizer) and _is_taken(optimizer, taker):
        args = _without_parameters(optimizer), *args[1:]
    return args, kwargs


@torch_internals.disable_dynamo
def _taker_of(optimizer: torch.optim.Optimizer) -> TakesSteps | None:
    return next((each for each in TAKERS if each.may_take(optimizer)), None)


@torch_internals.disable_dynamo
def _is_taken(optimizer: torch.optim.Optimizer, taker: TakesSteps | None) -> bool:
    return taker is not None and taker.take(optimizer)


def _without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer whose step does nothing."""
    empty = object.__new__(type(optimizer))
    vars(empty).update(vars(optimizer), param_groups=[])
    cast(Any, empty)._warned_capturable_if_run_uncaptured = True  # torch asks it of no groups
    return empty


@torch_internals.disable_dynamo  # a frame around the step is traced apart from what steps
def _look(optimizer: torch.optim.Optimizer) -> list[DTensor]:
    shards, others = count_writes(optimizer)
    if shards and others and not hasattr(optimizer, REFUSES_REPLACED):
        for look in LOOKS:
            look(optimizer, shards, others)
    return shards


@torch_internals.disable_dynamo
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    count_writes(optimizer)


def count_writes(optimizer: torch.optim.Optimizer) -> tuple[list[DTensor], list[torch.Tensor]]:
    """Counts a write to each DTensor of ``optimizer`` that has a gradient.

    Returns these DTensors, and the other parameters that have gradients.

    Raises:
        Zero3Error: see :func:`refuse_replaced`.
    """
    changed: list[DTensor] = []
    others: list[torch.Tensor] = []
    has_replaced = False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):
                if parameter.grad is not None:
                    changed.append(parameter)
                continue
            if parameter.grad is not None:
                others.append(parameter)
            if sharded_as(parameter) is not None:
                has_replaced = True
    torch.autograd.graph.increment_version(changed)
    if has_replaced and not hasattr(optimizer, REFUSES_REPLACED):
        refuse_replaced(optimizer)
    return changed, others
