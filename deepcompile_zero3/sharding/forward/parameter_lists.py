"""Containers of parameters: in a forward, their slices and copies contain gathered tensors."""

from typing import Any

import torch
from torch import nn


class SlicesTensors:
    """Base of sharded ``nn.ParameterList`` modules: in a forward, a slice is a list of tensors.

    torch's would make each gathered tensor a parameter, to which no gradient flows.
    """

    def __getitem__(self: Any, index: Any) -> Any:
        """Returns one entry, or several of a slice."""
        if isinstance(index, slice):
            values = [self[i] for i in range(*index.indices(len(self)))]
            if any(map(_is_gathered, values)):
                return values
        return super().__getitem__(index)  # type: ignore[misc]


class CopiesTensors:
    """Base of sharded ``nn.ParameterDict`` modules: in a forward, a copy is a dict of tensors."""

    def copy(self: Any) -> Any:
        """Returns a copy."""
        values = {key: self[key] for key in self}
        return values if any(map(_is_gathered, values.values())) else super().copy()  # type: ignore[misc]


def bases_of_container(cls: type) -> tuple[type, ...]:
    """Returns the bases that a sharded ``cls`` needs: none where it has methods of its own."""
    if issubclass(cls, nn.ParameterList) and cls.__getitem__ is nn.ParameterList.__getitem__:
        return (SlicesTensors,)
    if issubclass(cls, nn.ParameterDict) and cls.copy is nn.ParameterDict.copy:
        return (CopiesTensors,)
    return ()


def _is_gathered(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
