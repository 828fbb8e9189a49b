"""The values that a forward has read of a group's parameters, and whether they were replaced."""

from collections.abc import Iterable
from typing import TypeAlias

import torch

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.parameter import ShardedParameter

# Where the elements of a tensor are.
_Place: TypeAlias = tuple[int, torch.Size, tuple[int, ...]] | None


class ReadValues:
    """What reads of parameters have returned: each later read in a forward returns the same."""

    def __init__(self) -> None:
        self._values: dict[ShardedParameter, tuple[torch.Tensor, _Place]] = {}

    def get(self, parameter: ShardedParameter) -> torch.Tensor | None:
        """Returns what was read of ``parameter``, if it was read."""
        value, _ = self._values.get(parameter, (None, None))
        return value

    def put(self, parameter: ShardedParameter, value: torch.Tensor) -> None:
        """Notes that a read of ``parameter`` returns ``value``."""
        self._values[parameter] = value, _place(value)

    def forget(self, parameters: Iterable[ShardedParameter] | None = None) -> None:
        """Forgets what was read of ``parameters``, or of all.

        Raises:
            Zero3Error: its ``.data`` was replaced, and the change is lost.
        """
        refuse_writes(self.take_replaced(parameters))

    def take_replaced(self, parameters: Iterable[ShardedParameter] | None = None) -> list[str]:
        """Forgets likewise, and returns the FQNs of the parameters whose ``.data`` was replaced."""
        asked = list(self._values) if parameters is None else parameters
        read = [(p, *self._values.pop(p)) for p in asked if p in self._values]
        return [
            parameter.fqn
            for parameter, value, place in read
            # One of another dtype was converted for this forward.
            if _place(value) != place and value.dtype == parameter.compute_dtype
        ]


def refuse_writes(fqns: list[str]) -> None:
    """Raises a Zero3Error that names ``fqns``, whose gathered tensors were written to, if any."""
    if fqns:
        raise Zero3Error(
            f"{', '.join(map(repr, dict.fromkeys(fqns)))} was modified in place, or its .data was "
            "replaced, where it was a gathered copy, which is freed now: modify the parameter "
            "outside of forward, while it is sharded"
        )


def _place(value: torch.Tensor) -> _Place:
    """Returns where the elements of a value are that was read; None if it is of a subclass."""
    if type(value) is not torch.Tensor:
        return None
    return value.data_ptr(), value.shape, value.stride()
