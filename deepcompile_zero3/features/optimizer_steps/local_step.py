"""``step_locally``: an optimizer steps local tensors, without DTensor's dispatch of operators."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.optimizer_steps.flat_parameter import FlatParameter, flat_parameters
from deepcompile_zero3.features.optimizer_steps.rank_states import (
    NUMBERS,
    is_elsewhere,
    localized,
    state_to_load,
    state_to_save,
)
from deepcompile_zero3.features.optimizer_steps.step_layers import (
    WeakMethod,
    function_of,
    layers_of,
    parameters_replaced,
)
from deepcompile_zero3.features.owned.muon import Muon
from deepcompile_zero3.features.owned.owned import OwnedTensor, rows_of
from deepcompile_zero3.sharding.mesh_of_few import adopt
from deepcompile_zero3.sharding.replaced_parameters import refuse_replaced
from deepcompile_zero3.sharding.step_versions import REFUSES_REPLACED, count_step, count_writes
from deepcompile_zero3.torch_internals.optimizers import has_step_hooks

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


def step_locally(optimizer: torch.optim.Optimizer, *, is_elementwise: bool = False) -> None:
    """Makes ``optimizer.step()`` update local tensors, as plain parameters are updated.

    torch's optimizers work on the DTensors of a sharded model, and pay for DTensor's dispatch of
    each operator on each parameter, which takes longer than the update of a small parameter. After
    this call, a step sees plain tensors: the local tensors of parameters, gradients and states. Its
    ``foreach`` and ``fused`` kernels apply. On a CPU, an elementwise optimizer of ``torch.optim``
    steps many small parameters as one, with the same bits. Between steps, ``param_groups`` and
    ``state`` have DTensors as before, so that state dicts and checkpoints stay the same. Hooks of
    ``step`` see plain tensors. ``torch.compile(optimizer.step)`` runs it uncompiled.

    An optimizer of any class may step parameters that ranks have whole: those with an owner
    (:class:`MatrixOwners`), which only the owner steps. Its states may have any shape, as those of
    all optimizers that are not of ``torch.optim``. Between steps its ``state`` has the plain
    tensors of this rank. Its ``state_dict()`` is then collective, and makes DTensors of them. A
    state whose shapes follow those of the shards, and one of an owner, loads on any number of
    ranks; any other on as many ranks as saved it.

    Call it before or after a scheduler of learning rates is made, once.

    Args:
        optimizer: an optimizer of ``torch.optim`` that updates each element by itself, such as
            AdamW or SGD; or one of any class, such as Shampoo, that updates each parameter by
            itself, if each rank has its parameters whole or not at all.
        is_elementwise: says that an optimizer of another class updates each element by itself. It
            may update a parameter with an owner as a whole.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: the optimizer may need more of a parameter than this rank's elements.
        Zero3Error: the call is the second for ``optimizer``. ``state_dict()`` raises it if ranks
            have different numbers for one parameter, and ``load_state_dict()``, before it changes
            anything, for states of another number of ranks.
    """
    check_optimizer(
        "step_locally",
        optimizer,
        is_elementwise or _has_whole_parameters(optimizer),
        "may need more of a parameter than the elements that a rank has; if it updates each "
        "element by itself, pass is_elementwise=True; if it needs whole parameters, give each to "
        "one rank by fully_shard(shard_placement_fn=MatrixOwners(model)), and leave the others to "
        "another optimizer",
    )
    layers = layers_of(optimizer)
    if layers.locally is not None:
        raise Zero3Error(f"step_locally was called twice on the same {type(optimizer).__name__}")
    has_known_states = type(optimizer) in ELEMENTWISE or _is_muon_of_matrices(optimizer)
    locals_of = _LocalTensors(not layers.has_step_of_its_class, has_known_states)

    def local_step(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        refuse_replaced(optimizer)
        setattr(optimizer, REFUSES_REPLACED, True)
        try:
            with locals_of.swapped_into(optimizer):
                step()
        finally:
            delattr(optimizer, REFUSES_REPLACED)
            count_writes(optimizer)  # the hooks have seen local tensors

    layers.locally = local_step
    if not has_known_states:
        _store_states_of_ranks(optimizer)


def _store_states_of_ranks(optimizer: Any) -> None:
    """Makes state dicts of ``optimizer`` contain the states that differ between ranks."""
    save, load = function_of(optimizer.state_dict), function_of(optimizer.load_state_dict)

    @functools.wraps(save)
    def save_all(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return state_to_save(self, save(self, *args, **kwargs))

    @functools.wraps(load)
    def load_mine(self: torch.optim.Optimizer, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return load(self, state_to_load(self, state_dict), *args, **kwargs)

    optimizer.state_dict = WeakMethod(save_all, optimizer)
    optimizer.load_state_dict = WeakMethod(load_mine, optimizer)


def check_optimizer(caller: str, optimizer: object, is_trusted: bool, doubt: str) -> None:
    """Raises unless ``optimizer`` updates each element, or each matrix of a rank, by itself.

    Args:
        caller: name of the function that takes the optimizer.
        optimizer: the optimizer.
        is_trusted: whether the user says so, of an optimizer of any class.
        doubt: what an optimizer of another class may do, and the remedy.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: its class is none of torch's that do so.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{caller} takes an optimizer, got {type(optimizer).__name__}")
    if not (is_trusted or type(optimizer) in ELEMENTWISE or _is_muon_of_matrices(optimizer)):
        raise ValueError(f"{type(optimizer).__name__} {doubt}")


def _is_muon_of_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether ``optimizer`` is Muon and each rank has whole matrices of its parameters,
    or none.
    """
    if type(optimizer) is Muon:
        return True
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return type(optimizer) is torch.optim.Muon and all(
        isinstance(p, OwnedTensor) or not isinstance(p, DTensor) for p in parameters
    )


def _has_whole_parameters(optimizer: object) -> bool:
    """Returns whether ranks have all or nothing of each parameter of ``optimizer``.

    LBFGS also needs the other ranks' parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return all(
        not isinstance(p, DTensor) or all(each.is_replicate() for each in p.placements)
        for p in parameters
    )


class _LocalTensors:
    """The local tensors of an optimizer's parameters, as parameters of their own."""

    def __init__(self, is_wrapped: bool, has_known_states: bool) -> None:
        # States are numbers, or have the shapes of parameters.
        self._has_known_states = has_known_states
        # Somebody's function around the optimizer's step may look at each parameter.
        self._is_wrapped = is_wrapped
        # For each local tensor, a parameter in the same memory. Not for each DTensor: one with weak
        # references cannot be swapped, as to_empty() does.
        self._parameters = WeakIdKeyDictionary()

    @contextlib.contextmanager
    def swapped_into(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Puts local tensors in place of DTensors, in ``param_groups`` and ``state``."""
        states = cast(Any, optimizer).state
        is_in_parts = layers_of(optimizer).in_parts is not None
        local_states: defaultdict[Any, Any] = defaultdict(dict)
        local_states.update((k, v) for k, v in states.items() if not isinstance(k, torch.Tensor))
        local_of: list[tuple[DTensor, nn.Parameter]] = []
        flats: list[FlatParameter] = []
        elsewhere: list[torch.Tensor] = []
        try:
            locals_of_groups: list[list[torch.Tensor]] = []
            for group in optimizer.param_groups:
                given = group["params"]
                is_flat = not self._is_wrapped and _may_be_flat(optimizer, group)
                flats_of_group = flat_parameters(given, states) if is_flat else []
                flats += flats_of_group
                locals_of_groups.append([flat.parameter for flat in flats_of_group])
                done = {id(parameter) for flat in flats_of_group for parameter in flat.parameters}
                for parameter in given:
                    if id(parameter) in done:
                        continue
                    state = states.get(parameter)
                    local = parameter
                    if not self._has_known_states and is_elsewhere(parameter):
                        if parameter.grad is not None:
                            elsewhere.append(parameter)
                        continue
                    if isinstance(parameter, DTensor):
                        local = self._local(parameter)
                        local_of.append((parameter, local))
                        state = state and localized(state, parameter)
                    if state:
                        local_states[local] = state
                    locals_of_groups[-1].append(local)
            local_states.update((flat.parameter, flat.state) for flat in flats)
            cast(Any, optimizer).state = local_states
            with parameters_replaced(optimizer, locals_of_groups):
                yield
        finally:
            cast(Any, optimizer).state = states
            if any(flat.has_new_states for flat in flats):
                # Ranks differ in what is flat, and must not in the order of states.
                new = {id(p) for flat in flats if flat.state for p in flat.parameters}
                new |= {id(p) for p, local in local_of if local_states.get(local)}
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    if id(parameter) in new:
                        states[parameter]  # a defaultdict
            for flat in flats:
                local_states.pop(flat.parameter, None)
                flat.store(states)
            for parameter, local in local_of:
                local.grad = None
                if found := local_states.pop(local, None):
                    if self._has_known_states:
                        _update(states[parameter], found, parameter, local.shape)
                    else:
                        states[parameter] = found
                if is_in_parts and local.numel():
                    local.data = local.new_empty(0)  # the memory is lent for a part of a step
            states.update(local_states)  # those of plain parameters, and of none
            for parameter in elsewhere:  # torch steps an optimizer without entries to make states
                states[parameter]

    def _local(self, parameter: DTensor) -> nn.Parameter:
        local = torch_internals.local_tensor(parameter)
        mine: nn.Parameter | None = self._parameters.get(local)
        if mine is None:
            rows = rows_of(local, parameter)
            mine = nn.Parameter(rows, requires_grad=parameter.requires_grad)
            self._parameters[local] = mine
        elif mine.data_ptr() != local.data_ptr():
            mine.data = rows_of(local, parameter)  # the local tensor has other memory now
        gradient = torch_internals.local_gradient(parameter)
        if gradient is not None:
            if mine.grad_dtype != parameter.grad_dtype:  # it may change between steps
                mine.grad_dtype = parameter.grad_dtype
            mine.grad = rows_of(gradient, parameter)
        return mine


def _may_be_flat(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Returns whether parameters of ``group`` may be stepped as one, and nobody notices."""
    return (
        type(optimizer) in ELEMENTWISE
        and not (group.get("differentiable") or group.get("capturable"))
        and getattr(optimizer, "grad_scale", None) is None  # gradients are unscaled in place
        and layers_of(optimizer).in_parts is None  # else memory is scarce
        and not has_step_hooks(optimizer, other_than=count_step)
    )


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
