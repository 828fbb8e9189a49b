"""``step_locally``: an optimizer steps local tensors, without DTensor's dispatch of operators."""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.optimizer_steps.local_tensors import (
    ELEMENTWISE,
    LocalTensors,
    is_unobserved,
)
from deepcompile_zero3.features.optimizer_steps.rank_states import state_to_load, state_to_save
from deepcompile_zero3.features.optimizer_steps.step_layers import (
    WeakMethod,
    function_of,
    layers_of,
    parameters_replaced,
)
from deepcompile_zero3.features.owned.muon import Muon
from deepcompile_zero3.features.owned.owned import OwnedTensor
from deepcompile_zero3.sharding.gradients.step_versions import REFUSES_REPLACED, count_writes
from deepcompile_zero3.sharding.setup.replaced_parameters import refuse_replaced


def step_locally(optimizer: torch.optim.Optimizer, *, is_elementwise: bool = False) -> None:
    """Makes ``optimizer.step()`` update local tensors, as plain parameters are updated.

    An optimizer that works on the DTensors of a sharded model pays for DTensor's dispatch of each
    operator on each parameter, which takes longer than the update of a small parameter. Those of
    ``torch.optim`` that update each element by itself are spared it as they are, unless somebody
    looks at the step. After this call, any step sees plain tensors: the local tensors of
    parameters, gradients and states. Its ``foreach`` and ``fused`` kernels apply. Between steps,
    ``param_groups`` and ``state`` have DTensors as before, so that state dicts and checkpoints stay
    the same. Hooks of ``step`` see plain tensors. ``torch.compile(optimizer.step)`` runs it
    uncompiled.

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
    has_step_of_its_class = layers.has_step_of_its_class  # else that may look at each parameter
    earlier = WeakIdKeyDictionary()

    def local_step(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        refuse_replaced(optimizer)
        setattr(optimizer, REFUSES_REPLACED, True)
        is_in_parts = layers_of(optimizer).in_parts is not None  # since memory is scarce
        may_be_flat = has_step_of_its_class and not is_in_parts and is_unobserved(optimizer)
        states = cast(Any, optimizer).state
        try:
            tensors = LocalTensors(optimizer, has_known_states, may_be_flat, earlier)
            try:
                cast(Any, optimizer).state = tensors.states
                with parameters_replaced(optimizer, tensors.groups):
                    step()
            finally:
                cast(Any, optimizer).state = states
                tensors.store(is_lent=is_in_parts)
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
