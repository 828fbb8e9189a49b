"""``offload_optimizer``: states of an optimizer live in the file of a ``FileOffloadPolicy``."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.file_offload import is_worth_a_file
from deepcompile_zero3.sharding.local_step import (
    WeakMethod,
    check_optimizer,
    function_of,
    parameters_replaced,
)
from deepcompile_zero3.sharding.memory import Memory
from deepcompile_zero3.sharding.registered import all_parameters_of


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
    ``optimizer.step()`` steps some parameters at a time. While one part is stepped, the kernel
    reads the states of the next one. States that the first step creates go to the file part by
    part, so that they are never all in memory. Between steps, ``state`` and state dicts have the
    same tensors as before, and values are the same bits. Hooks of ``step`` run for each part.

    Call it once, before the first forward: memory that states will take is then not given to
    activations. It goes with :func:`step_in_backward`, whose steps are such parts already, and with
    :func:`step_locally`, which comes before.

    Args:
        model: a module that was sharded with a ``FileOffloadPolicy``.
        optimizer: an optimizer of ``torch.optim`` that updates each parameter by itself, as all do
            but LBFGS and, over shards, Muon.
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
    if not part_mb > 0 or not state_bytes >= 0:
        raise ValueError(
            "part_mb is a positive number of MiB and state_bytes a number of bytes, got "
            f"{part_mb!r} and {state_bytes!r}"
        )
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [p for p in all_parameters_of(model, "offload_optimizer") if id(p.shard) in given]
    found = [parameter for parameter in found if parameter.memory is not None]
    if not found:
        raise Zero3Error(
            "offload_optimizer: the optimizer has no parameter of the model that was sharded with "
            "offload_policy=FileOffloadPolicy(...)"
        )
    if hasattr(optimizer.step, "_steps_in_parts"):
        raise Zero3Error(f"offload_optimizer was called twice on one {type(optimizer).__name__}")
    memory = cast(Memory, found[0].memory)
    memory.reserve_states(found, state_bytes)
    step, part_bytes = function_of(optimizer.step), int(part_mb * 2**20)

    @functools.wraps(step)
    def step_in_parts(self: torch.optim.Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = list(_parts(self, part_bytes))
        kept = 0
        for number, part in enumerate(parts):
            for following in parts[number + 1 : number + 2]:
                for tensor in _tensors_of(self, following):
                    _C.prefetch_pages(tensor)
            with parameters_replaced(self, part):
                step(self, **kwargs)
            kept = _settle(self, part, memory, kept)
        return loss

    cast(Any, step_in_parts)._steps_in_parts = True
    cast(Any, optimizer).step = WeakMethod(step_in_parts, optimizer)


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


def _settle(
    optimizer: torch.optim.Optimizer,
    part: Sequence[Sequence[torch.Tensor]],
    memory: Memory,
    kept: int,
) -> int:
    """Moves states that have been created to the file, and lets go of its pages.

    Returns:
        The bytes of states in memory, with ``kept``, those of the parts before.
    """
    for tensor in _tensors_of(optimizer, part):
        if _C.is_in_file(tensor):
            _C.finish_reading(tensor)
            memory.tier.count_written(tensor.nbytes)
    for parameter in (each for group in part for each in group):
        for value in optimizer.state.get(parameter, {}).values():
            state = _local(value)
            if not is_worth_a_file(state) or _C.is_in_file(state):
                continue
            if kept + state.nbytes <= memory.states:
                kept += state.nbytes
            else:
                state.data = memory.tier.copy(state)
    return kept


def _tensors_of(
    optimizer: torch.optim.Optimizer, part: Sequence[Sequence[torch.Tensor]]
) -> Iterator[torch.Tensor]:
    """Yields the local tensors of the parameters of a part, and of their states."""
    for parameter in (each for group in part for each in group):
        yield _local(parameter)
        states = optimizer.state.get(parameter, {}).values()
        yield from (_local(value) for value in states if isinstance(value, torch.Tensor))


def _local(value: Any) -> Any:
    return torch_internals.local_tensor(value) if isinstance(value, DTensor) else value
