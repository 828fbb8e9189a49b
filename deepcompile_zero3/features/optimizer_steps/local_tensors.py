"""The tensors that an optimizer steps in place of DTensors."""

from collections import defaultdict
from operator import is_not
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.features.optimizer_steps.flat_parameter import FlatParameter, flat_parameters
from deepcompile_zero3.features.optimizer_steps.rank_states import NUMBERS, localized
from deepcompile_zero3.features.owned.owned import is_elsewhere, rows_of
from deepcompile_zero3.sharding.gradients.step_versions import has_hooks
from deepcompile_zero3.sharding.layouts.mesh_of_few import adopt

# Optimizers of torch that update an element by its own gradient and state.
ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

_State = dict[str, Any]


def is_unobserved(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether ``optimizer`` updates each element by itself, and nobody may see how."""
    return (
        type(optimizer) in ELEMENTWISE
        and getattr(optimizer, "grad_scale", None) is None  # gradients are unscaled in place
        and not has_hooks(optimizer)
    )


class LocalTensors:
    """Parameters and states that stand for an optimizer's in one step of it.

    They are in the memory of the local tensors of its DTensors, but for small ones that are copied
    to flat tensors.

    Attributes:
        groups: the parameters, those of each group.
        states: their states.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        has_known_states: bool,
        may_be_flat: bool,
        earlier: WeakIdKeyDictionary | None = None,
    ) -> None:
        """Makes them.

        Args:
            optimizer: an optimizer that is about to step.
            has_known_states: whether states are numbers, or have the shapes of parameters.
            may_be_flat: whether small parameters may be stepped as one, and nobody notices.
            earlier: the parameters of earlier steps by local tensor, which stand in again, for
                optimizers that know them by more than their states; None makes new ones.
        """
        self._optimizer = optimizer
        self._has_known_states = has_known_states
        self._earlier = earlier
        self._given: defaultdict[Any, Any] = cast(Any, optimizer).state
        # DTensors, what stands for them, and their states before the step.
        self._local_of: list[tuple[DTensor, nn.Parameter, list[Any]]] = []
        self._flats: list[FlatParameter] = []
        self._elsewhere: list[torch.Tensor] = []
        self.states: defaultdict[Any, Any] = defaultdict(dict)
        if not has_known_states:  # some may be of no parameter
            self.states.update((k, v) for k, v in self._given.items() if not torch.is_tensor(k))
        self.groups = [
            self._of_group(group["params"], may_be_flat and _may_be_flat(group))
            for group in optimizer.param_groups
        ]

    def _of_group(self, given: list[torch.Tensor], may_be_flat: bool) -> list[torch.Tensor]:
        flats = flat_parameters(given, self._given) if may_be_flat else []
        self._flats += flats
        self.states.update((flat.parameter, flat.state) for flat in flats)
        stepped: list[torch.Tensor] = [flat.parameter for flat in flats]
        done = {id(parameter) for flat in flats for parameter in flat.parameters}
        for parameter in given:
            if id(parameter) in done:
                continue
            state = self._given.get(parameter)
            local = parameter
            if not self._has_known_states and is_elsewhere(parameter):
                if parameter.grad is not None:
                    self._elsewhere.append(parameter)
                continue
            if isinstance(parameter, DTensor):
                local = self._local(parameter)
                state = state and self._localized(state, parameter)
                self._local_of.append((parameter, local, [*state.values()] if state else []))
            if state:
                self.states[local] = state
            stepped.append(local)
        return stepped

    def _localized(self, state: _State, parameter: DTensor) -> _State:
        if not self._has_known_states:
            return localized(state, parameter)
        return {
            key: rows_of(torch_internals.local_tensor(value), parameter)
            if isinstance(value, DTensor)
            else value
            for key, value in state.items()
        }

    def _local(self, parameter: DTensor) -> nn.Parameter:
        """Returns a parameter, with its gradient, in the memory of those of ``parameter``.

        Writes to it do not count as writes to the local tensor, as those through DTensors do not.
        """
        tensor = torch_internals.local_tensor(parameter)
        local: nn.Parameter | None = None if self._earlier is None else self._earlier.get(tensor)
        if local is None:
            rows = rows_of(tensor, parameter)
            local = nn.Parameter(rows.data, requires_grad=parameter.requires_grad)
            if self._earlier is not None:
                self._earlier[tensor] = local
        elif local.data_ptr() != tensor.data_ptr():
            local.data = rows_of(tensor, parameter)  # the local tensor has other memory now
        gradient = torch_internals.local_gradient(parameter)
        if gradient is not None and local.grad_dtype != parameter.grad_dtype:
            local.grad_dtype = parameter.grad_dtype  # it may change between steps
        local.grad = None if gradient is None else rows_of(gradient, parameter)
        return local

    def store(self, is_lent: bool = False) -> None:
        """Gives what the step has changed to the optimizer's own parameters and states.

        Args:
            is_lent: whether the memory of parameters is lent for a part of the step.
        """
        states = self._given
        for parameter in self._new_in_order():
            states[parameter]  # a defaultdict
        for flat in self._flats:
            self.states.pop(flat.parameter, None)
            flat.store(states)
        for parameter, local, before in self._local_of:
            local.grad = None
            if found := self.states.pop(local, None):
                if not self._has_known_states:
                    states[parameter] = found
                elif len(found) != len(before) or any(map(is_not, found.values(), before)):
                    _update(states[parameter], found, parameter, local.shape)
            if is_lent and local.numel():
                local.data = local.new_empty(0)
        states.update(self.states)  # those of plain parameters, and of none
        for parameter in self._elsewhere:  # torch steps an optimizer without entries to make states
            states[parameter]

    def _new_in_order(self) -> list[torch.Tensor]:
        """Returns the parameters that have their first states now, in the order of the groups.

        Ranks differ in what is flat, and must not in the order of states.
        """
        new = {id(p) for flat in self._flats if flat.has_new_states for p in flat.parameters}
        get = self.states.get
        new |= {id(p) for p, local, before in self._local_of if not before and get(local)}
        if not new:
            return []
        new |= {id(key) for key in self.states if isinstance(key, torch.Tensor)}
        given = (p for group in self._optimizer.param_groups for p in group["params"])
        return [p for p in given if id(p) in new]


def _may_be_flat(group: dict[str, Any]) -> bool:
    return not (group.get("differentiable") or group.get("capturable"))


def _update(state: _State, local: _State, parameter: DTensor, shape: torch.Size) -> None:
    """Takes changes of the ``local`` state over into the state of ``parameter``.

    ``shape`` is that of the local tensor.
    """
    for key in state.keys() - local.keys():
        del state[key]
    for key, value in local.items():
        # A number of the optimizer's is not a part of a scalar parameter.
        is_number = shape == () and key in NUMBERS
        is_like = isinstance(value, torch.Tensor) and value.shape == shape and not is_number
        known = state.get(key)
        if known is value or (
            isinstance(known, DTensor) and torch_internals.local_tensor(known) is value
        ):
            continue
        state[key] = torch_internals.dtensor_like(value, parameter) if is_like else value
        adopt(state[key])
