"""Checks and sinks: features that look at a reduced gradient, or take it from ``.grad``."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from deepcompile_zero3.errors import Zero3Error

if TYPE_CHECKING:
    from deepcompile_zero3.sharding.parameter import ShardedParameter

# Attribute of a shard whose gradient is gone after a backward: the reason, and the remedy.
_IS_TAKEN = "_zero3_gradient_is_taken"


# Looks at reduced gradients at the end of a backward, before anything else does. Returns an error
# message, or "". A check may communicate: all ranks call their checks in the order of their names.
Check = Callable[["Sequence[tuple[ShardedParameter, torch.Tensor]]"], str]


class Sink(Protocol):
    """Takes the gradients of some parameters as soon as they are in ``.grad``. Hashable.

    Where possible, that is when their bucket is reduced, and not at the end of the backward. Hooks
    run first. If a step has several backwards, the sink takes the sums of their gradients, in the
    last one (``set_is_last_backward``).
    """

    def take(self, parameters: "Sequence[ShardedParameter]") -> None:
        """Takes gradients, on the thread of the backward. May set ``.grad`` to None."""

    def finish(self, model_numbers: Sequence[int]) -> None:
        """Called when a backward of these models has ended, with all of its gradients."""

    def interrupt(self, model_numbers: Sequence[int]) -> None:
        """Called when a backward of these models has raised, perhaps after some were taken."""


def say_taken(shard: torch.Tensor, why: str | None) -> None:
    """Says why the gradient of ``shard`` is gone after a backward. None: it is there."""
    if why is not None:
        setattr(shard, _IS_TAKEN, why)
    elif hasattr(shard, _IS_TAKEN):
        delattr(shard, _IS_TAKEN)


def refuse_if_taken(shard: torch.Tensor, caller: str) -> None:
    """Raises Zero3Error if the gradient of ``shard`` is gone when ``caller`` would read it."""
    if (why := getattr(shard, _IS_TAKEN, None)) is not None:
        raise Zero3Error(f"{caller}: {why}")
