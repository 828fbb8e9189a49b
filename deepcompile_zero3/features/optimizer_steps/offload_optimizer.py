"""``offload_optimizer``: states of an optimizer live in the file of a ``FileOffloadPolicy``."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.offload.file_policy import is_worth_a_file
from deepcompile_zero3.features.optimizer_steps.local_step import check_optimizer
from deepcompile_zero3.features.optimizer_steps.step_layers import layers_of, parameters_replaced
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.budget import Budget
from deepcompile_zero3.sharding.module_parameters import parameters_in


def offload_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    state_bytes: int = 8,
    part_mb: float = 16.0,
    is_separate: bool = False,
) -> None:
    """Makes ``optimizer`` keep the states that exceed the memory budget of ``model`` in its file.

    The model was sharded with ``offload_policy=FileOffloadPolicy(...)``. From now on,
    ``optimizer.step()`` steps some parameters at a time. While one part is stepped, other threads
    load the next one, and store the one before. States that the first step creates go to the file
    part by part, so that they are never all in memory. Between steps, ``state`` and state dicts
    have the same tensors as before, and values are the same bits. Hooks of ``step`` run for each
    part: they may read and write the parameters that ``param_groups`` has then, and no others.

    A state that an optimizer creates when it is made, as Adagrad does, stays in memory until the
    first step. If the disk is full, all parameters are stepped, and then an error is raised.

    Call it once, before the first forward: memory that states will take is then not given to
    activations. It goes with :func:`step_in_backward`, whose steps are such parts already, and with
    :func:`step_locally`, in any order.

    Args:
        model: a module that was sharded with a ``FileOffloadPolicy``.
        optimizer: an optimizer of ``torch.optim`` that updates each parameter by itself, as all do
            but LBFGS, Adafactor and, over shards, Muon.
        state_bytes: bytes of states for each element of a parameter: 8 for AdamW in fp32.
        part_mb: size in MiB of the shards that are stepped at a time.
        is_separate: says that an optimizer of another class updates each parameter by itself.

    Raises:
        Zero3Error: ``optimizer`` has no parameter of ``model`` with such a policy, or the call is
            the second for ``optimizer``.
        ValueError: ``optimizer`` may need several parameters at once, or a number is not positive.
        TypeError: ``model`` is not a module, or ``optimizer`` is not an optimizer.
    """
    check_optimizer(
        "offload_optimizer",
        optimizer,
        is_separate,
        "may need several parameters at once, or other ranks; if it updates each parameter by "
        "itself, pass is_separate=True",
    )
    if not 0 < part_mb < 2**40 or not 0 <= state_bytes < 2**40:
        raise ValueError(
            "part_mb is a positive number of MiB and state_bytes one of bytes, below 2**40, got "
            f"{part_mb!r} and {state_bytes!r}"
        )
    found = parameters_in(optimizer, model, "offload_optimizer")
    found = [parameter for parameter in found if parameter.budget is not None]
    others = [parameter for parameter in found if parameter.budget is not found[0].budget]
    if others:
        raise Zero3Error(
            f"offload_optimizer: '{found[0].fqn}' and '{others[0].fqn}' were sharded with two "
            "FileOffloadPolicy objects: make an optimizer for each"
        )
    if not found:
        raise Zero3Error(
            "offload_optimizer: no parameter of the optimizer was sharded with a FileOffloadPolicy:"
            " call fully_shard(..., offload_policy=FileOffloadPolicy(...)) on the model"
        )
    layers = layers_of(optimizer)
    if layers.in_parts is not None:
        raise Zero3Error(f"offload_optimizer was called twice on one {type(optimizer).__name__}")
    budget = cast(Budget, found[0].budget)
    budget.reserve_states(found, state_bytes)
    parameters = weakref.WeakSet(found)
    part_bytes = int(part_mb * 2**20)

    def step_in_parts(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        parts = [_Part(optimizer, part) for part in _parts(optimizer, part_bytes)]
        most = budget.bytes_for_states(parameters)
        failure = None
        with contextlib.ExitStack() as at_end:  # whatever is raised, the file is left as written
            at_end.callback(setattr, layers_of(optimizer), "has_more_parts", False)
            for part in parts:
                at_end.callback(part.wait_for_stores)
            for number, part in enumerate(parts):
                for each in parts[number : number + 2]:
                    each.start_loading()
                layers_of(optimizer).has_more_parts = number + 1 < len(parts)
                with part.in_memory(), parameters_replaced(optimizer, part.parameters):
                    step()
                for each in parts[max(number - 1, 0) : number]:
                    each.wait_for_stores()
                try:
                    part.settle(budget, most)
                except Zero3Error as error:  # all parameters are stepped first
                    failure = failure or error
        if failure is not None:
            raise failure

    layers.in_parts = step_in_parts


def _parts(optimizer: torch.optim.Optimizer, part_bytes: int) -> Iterator[list[list[torch.Tensor]]]:
    """Yields the parameters of each group that are stepped at a time: those with a gradient."""
    number_of_groups = len(optimizer.param_groups)
    part: list[list[torch.Tensor]] = [[] for _ in range(number_of_groups)]
    nbytes = 0
    for position, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            size = _local(parameter).nbytes
            if nbytes and nbytes + size > part_bytes:
                yield part
                part, nbytes = [[] for _ in range(number_of_groups)], 0
            part[position].append(parameter)
            nbytes += size
    yield part


class _Part:
    """Parameters of each group that are stepped together, and their states."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[list[torch.Tensor]]
    ) -> None:
        self.parameters = parameters
        self._states = cast(Any, optimizer).state
        self._loads: list[tuple[torch.Tensor, torch.Tensor, _C.Transfer]] | None = None
        self._stores: list[_C.Transfer] = []

    def start_loading(self) -> None:
        """Starts to copy the tensors in the file to memory."""
        if self._loads is None:
            shards = (_local(parameter) for parameter in self._each())
            tensors = (*shards, *self._states_of(self._each()))
            stored = [each for each in tensors if _C.is_in_file(each)]
            self._loads = [(each, each.detach(), _C.Transfer.load(each)) for each in stored]

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[None]:
        """In the block, all tensors are in memory; after it, changes are on their way back."""
        loads, self._loads = self._loads or [], []
        swapped = []
        try:
            while loads:
                tensor, stored, load = loads.pop()
                tensor.data = load.wait()
                swapped.append((tensor, stored))
                del load  # it has the memory too
            yield
        finally:
            for tensor, stored in swapped:
                memory, tensor.data = tensor.detach(), stored
                self._stores.append(_C.Transfer.store(memory, stored))

    def wait_for_stores(self) -> None:
        """Waits until all changes are in the file."""
        with contextlib.ExitStack() as all_of_them:
            while self._stores:
                all_of_them.callback(self._stores.pop().wait)

    def settle(self, budget: Budget, most: float) -> None:
        """Moves states to the file until the optimizer has ``most`` bytes of them in memory."""
        here = _in_memory(self._states_of(self._each()))
        if not here:
            return
        excess = sum(state.nbytes for state in _in_memory(self._states_of(self._states))) - most
        for state in here:
            if excess > 0:
                state.data = budget.tier.copy(state)
                excess -= state.nbytes

    def _each(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.parameters for parameter in group)

    def _states_of(self, parameters: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Yields the local tensors of states."""
        for parameter in parameters:
            values = self._states.get(parameter, {}).values()
            yield from (_local(value) for value in values if isinstance(value, torch.Tensor))


def _in_memory(states: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [each for each in states if is_worth_a_file(each) and not _C.is_in_file(each)]


def _local(value: Any) -> Any:
    return torch_internals.local_tensor(value) if isinstance(value, DTensor) else value
