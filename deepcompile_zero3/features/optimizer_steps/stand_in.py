"""Steps on local tensors without being asked: those of torch's elementwise optimizers.

``step_locally`` is for other optimizers, and where hooks or another ``step`` look on.
"""

import weakref
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from deepcompile_zero3.features.optimizer_steps.local_tensors import LocalTensors, may_step_flat
from deepcompile_zero3.features.optimizer_steps.step_layers import steps_in_parts
from deepcompile_zero3.sharding.model import live_shards
from deepcompile_zero3.sharding.step_versions import StandIn
from deepcompile_zero3.torch_internals import local_tensor, spec_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Optimizers that have been found to step shards of this library.
_ours: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()


def may_be_for(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether ``optimizer`` has shards of this library, updates each element by itself, and
    nobody may look at its step.
    """
    if not may_step_flat(optimizer) or steps_in_parts(optimizer):
        return False
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        return False
    if optimizer not in _ours:
        ours = live_shards()
        if not any(id(parameter) in ours for group in groups for parameter in group["params"]):
            return False
        _ours.add(optimizer)
    return True


def stand_in_for(optimizer: torch.optim.Optimizer) -> StandIn | None:
    """Returns an optimizer that has the local tensors of ``optimizer`` for a step.

    Nothing of ``optimizer`` changes: if the step raises, what it has written in place is written.

    Returns:
        None if the step on DTensors may be another: with parameters that are no plain shards, or
        with gradients or states of other parts than theirs.
    """
    groups, states = optimizer.param_groups, cast(Any, optimizer).state
    if not all(_is_known(p, states.get(p)) for group in groups for p in group["params"]):
        return None
    tensors = LocalTensors(optimizer, has_known_states=True, may_be_flat=True)
    stand_in = cast(Any, object.__new__(type(optimizer)))
    vars(stand_in).update(vars(optimizer))
    stand_in.state = tensors.states
    stand_in.param_groups = [
        {**group, "params": params, **_kernels(group)}
        for group, params in zip(groups, tensors.groups, strict=True)
    ]
    return stand_in, tensors.store


def _is_known(parameter: torch.Tensor, state: dict[str, Any] | None) -> bool:
    """Returns whether a parameter is plain, or a DTensor of which this rank has the same part as of
    its gradient and its states.
    """
    if type(parameter) is not DTensor:
        return type(parameter) in _PLAIN
    if type(local_tensor(parameter)) not in _PLAIN:
        return False
    placements = spec_of(parameter).placements
    for value in (parameter.grad, *(state.values() if state else ())):
        kind = type(value)
        if kind is DTensor:
            found = spec_of(value).placements
            if found is not placements and found != placements:
                return False
        elif value is not None and (kind is not torch.Tensor or value.dim()):
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
