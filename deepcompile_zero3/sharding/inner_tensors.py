"""Frozen parameters of tensor subclasses that do not say how to gather them.

torch's traceable wrapper subclasses are made of inner tensors. torchao's weights for inference, for
example, are made of codes, scales and zero points. Inner tensors that have a row for each row of
the parameter are gathered in its place. The others are the same on all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals


def says_what_to_gather(tensor: torch.Tensor) -> bool:
    """Returns whether the class of ``tensor`` has FSDP2's all-gather extensions."""
    methods = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    return all(hasattr(tensor, name) for name in methods)


def is_made_of_rows(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is gathered as its inner tensors."""
    is_wrapper = torch_internals.is_wrapper(tensor) and not isinstance(tensor, DTensor)
    has_inner = is_wrapper and hasattr(tensor, "__tensor_flatten__")
    return has_inner and not says_what_to_gather(tensor) and bool(_names_of(tensor)[0])


def _names_of(tensor: torch.Tensor) -> tuple[list[str], list[str]]:
    """Returns the names of the inner tensors that have its rows, and of the others.

    None have its rows if they cannot be gathered.
    """
    tensor = tensor.detach()
    names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    try:
        first = tensor[:1]
    except (ArithmeticError, AssertionError, RuntimeError, ValueError):  # its own code
        return [], names
    rows = tensor.shape[0]
    sliced: list[str] = []
    others: list[str] = []
    for name in names:
        inner = getattr(tensor, name)
        is_sliced = getattr(first, name).shape != inner.shape or (rows == 1 and inner.dim() > 0)
        if torch_internals.is_wrapper(inner) or (is_sliced and inner.shape[0] != rows):
            return [], names
        (sliced if is_sliced else others).append(name)
    return sliced, others


def chunk_of_rows(full: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Returns a rank's rows of ``full``, in the layout of torch.chunk. There may be none."""
    names, others = _names_of(full)
    inner = {name: getattr(full, name) for name in others}
    for name in names:
        chunks = getattr(full, name).chunk(world_size)
        inner[name] = chunks[rank] if rank < len(chunks) else getattr(full, name)[:0]
    shape = (inner[names[0]].shape[0], *full.shape[1:])
    return _made_of(full, inner, shape)


def _made_of(
    like: torch.Tensor, inner: dict[str, torch.Tensor], shape: Sequence[int]
) -> torch.Tensor:
    attributes = like.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    cls: Any = type(like)
    made: torch.Tensor = cls.__tensor_unflatten__(inner, attributes, shape, like.stride())
    return made


class InnerTensors:
    """All-gather extensions of one parameter, which gather its inner tensors.

    Args:
        full: the whole parameter, which is made of rows.
        world_size: number of ranks that its rows are sharded over.
    """

    def __init__(self, full: nn.Parameter, world_size: int) -> None:
        self._class = type(full.detach())
        self._attributes = full.detach().__tensor_flatten__()[1]  # type: ignore[attr-defined]
        self._names, self._others = _names_of(full)
        self._shape, self._stride = full.shape, full.stride()
        self._chunk_rows = -(-full.shape[0] // world_size)

    def takes(self, local: torch.Tensor) -> bool:
        """Returns whether ``local`` is made as the parameter was."""
        return type(local) is self._class

    def pre_all_gather(
        self, local: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Returns the inner tensors that are gathered, with as many rows on all ranks, and others.

        Args:
            local: this rank's rows of the parameter.
        """
        inputs = []
        for name in self._names:
            rows: torch.Tensor = getattr(local, name)
            padded = rows.new_zeros(self._chunk_rows, *rows.shape[1:])
            padded[: rows.shape[0]] = rows
            inputs.append(padded)
        return tuple(inputs), tuple(getattr(local, name) for name in self._others)

    def post_all_gather(
        self, gathered: Sequence[torch.Tensor], others: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns the whole parameter, of ``dtype``."""
        inner = dict(zip(self._others, others, strict=True))
        for name, rows in zip(self._names, gathered, strict=True):
            inner[name] = rows[: self._shape[0]]
        full = self._class.__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, self._attributes, self._shape, self._stride
        )
        return full if full.dtype == dtype else full.to(dtype)
