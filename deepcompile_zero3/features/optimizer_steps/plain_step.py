"""Steps of torch's elementwise optimizers on local tensors, without being asked.

``step_locally`` is for other optimizers, and for steps that somebody may look at.
"""

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from deepcompile_zero3.features.optimizer_steps.local_tensors import LocalTensors, is_unobserved
from deepcompile_zero3.features.optimizer_steps.rank_states import NUMBERS
from deepcompile_zero3.features.optimizer_steps.step_layers import steps_in_parts
from deepcompile_zero3.sharding.gradients.step_versions import TakesSteps
from deepcompile_zero3.sharding.layouts.replicated_gradient import ReplicatedGradient
from deepcompile_zero3.sharding.model import live_shards
from deepcompile_zero3.torch_internals import local_tensor, spec_of
from deepcompile_zero3.torch_internals.optimizers import step_of_torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTENSORS = (DTensor, ReplicatedGradient)

# The ids of the DTensors of an optimizer, all of which were shards of this library.
_shards_of: "weakref.WeakKeyDictionary[torch.optim.Optimizer, frozenset[int]]" = (
    weakref.WeakKeyDictionary()
)


def may_take(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether ``optimizer`` updates each element of this library's shards by itself, and
    nobody may look at its step.
    """
    return (
        is_unobserved(optimizer)
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        and step_of_torch(optimizer) is not None
        and _has_our_shards(optimizer)
    )


def take(optimizer: torch.optim.Optimizer) -> bool:
    """Takes a step of ``optimizer``, as it would on DTensors.

    Returns False, and does nothing, if it may have done something else: with parameters that are no
    plain shards or come twice, with gradients or states of other parts than theirs, or with a
    learning rate that is a DTensor.
    """
    if any(_has_dtensor(value) for group in optimizer.param_groups for value in group.values()):
        return False
    states = cast(Any, optimizer).state
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if len(set(map(id, parameters))) != len(parameters):
        return False
    if not all(_is_known(each, states.get(each)) for each in parameters):
        return False
    step = cast(Callable[[torch.optim.Optimizer], object], step_of_torch(optimizer))
    # Parts of an optimizer come and go with their memory, each tensor by itself.
    may_be_flat = not steps_in_parts(optimizer)
    tensors = LocalTensors(optimizer, has_known_states=True, may_be_flat=may_be_flat)
    stand_in = cast(Any, object.__new__(type(optimizer)))
    before = dict(vars(optimizer))
    vars(stand_in).update(before)
    stand_in.state = tensors.states
    stand_in.param_groups = [
        {**group, "params": stepped, **_kernels(group)}
        for group, stepped in zip(optimizer.param_groups, tensors.groups, strict=True)
    ]
    try:
        step(stand_in)
    finally:
        tensors.store()
        changed = {k: v for k, v in vars(stand_in).items() if before.get(k, before) is not v}
        vars(optimizer).update(
            (k, v) for k, v in changed.items() if k not in ("state", "param_groups")
        )
        stepped = (states[each] for each in parameters if each.grad is not None and each in states)
        torch.autograd.graph.increment_version(
            [value for state in stepped for value in state.values() if type(value) is DTensor]
        )
    return True


# What ``plugins`` give to the core.
TAKER = TakesSteps(may_take, take)


def _has_our_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether ``optimizer`` has DTensors, all of them shards of this library."""
    groups = optimizer.param_groups
    found = {id(p) for group in groups for p in group["params"] if isinstance(p, DTensor)}
    known = _shards_of.get(optimizer)
    if known is None or not found <= known:  # parts of them may step at a time
        if not found <= live_shards().keys():
            return False
        _shards_of[optimizer] = frozenset(found)
    return bool(found)


def _has_dtensor(setting: Any) -> bool:
    """Returns whether a setting of a group is a DTensor, or a tuple with one such as betas."""
    if isinstance(setting, tuple):
        return any(isinstance(each, DTensor) for each in setting)
    return isinstance(setting, DTensor)


def _is_known(parameter: torch.Tensor, state: dict[str, Any] | None) -> bool:
    """Returns whether a parameter is plain, or a DTensor of which this rank has the same part as of
    its gradient and its states.
    """
    if type(parameter) is not DTensor:
        return type(parameter) in _PLAIN
    if type(local_tensor(parameter)) not in _PLAIN:
        return False
    if parameter.grad is not None and type(parameter.grad) not in _DTENSORS:
        return False  # a plain tensor, which a scalar may have
    mine = spec_of(parameter)
    for key, value in (("grad", parameter.grad), *(state.items() if state else ())):
        kind = type(value)
        if kind in _DTENSORS:
            spec = spec_of(value)
            if spec is not mine and (spec.placements, spec.mesh) != (mine.placements, mine.mesh):
                return False
        elif value is not None and not (
            kind is torch.Tensor
            # A scalar is the same on all ranks, and so are its states.
            and (not parameter.shape or key in NUMBERS)
            and not value.shape
        ):
            return False
    return True


def _kernels(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the kernels that torch would choose for the DTensors of ``group``.

    On a GPU it would choose ``foreach`` for plain tensors, which takes as much memory again.
    """
    is_default = group.get("foreach", False) is None and not group.get("fused")
    if is_default and any(isinstance(parameter, DTensor) for parameter in group["params"]):
        return {"foreach": False}
    return {}
