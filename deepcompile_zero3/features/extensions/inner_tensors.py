"""Frozen parameters of tensor subclasses that do not say how to gather them.

torch's traceable wrapper subclasses are made of inner tensors. torchao's weights for inference, for
example, are made of codes, scales and zero points. Inner tensors that have a row for each row of
the parameter are gathered in its place. The others must be the same on all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.layouts.checksum import checksum


def says_what_to_gather(tensor: torch.Tensor) -> bool:
    """Returns whether the class of ``tensor`` has FSDP2's all-gather extensions."""
    methods = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    return all(hasattr(tensor, name) for name in methods)


def is_made_of_rows(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is gathered as its inner tensors."""
    is_wrapper = torch_internals.is_wrapper(tensor) and not isinstance(tensor, DTensor)
    has_inner = is_wrapper and hasattr(tensor, "__tensor_flatten__")
    return has_inner and not says_what_to_gather(tensor) and bool(_names_of(tensor)[0])


def _names_of(tensor: Any) -> tuple[list[str], list[str]]:
    """Returns the names of the inner tensors that have its rows, and of the others.

    None have its rows if they cannot be gathered.
    """
    names = tensor.__tensor_flatten__()[0]
    try:
        tensor = tensor.detach()
        first = tensor[:1]
    except Exception:  # whatever a subclass raises for what it does not support
        return [], names
    if type(first) is not type(tensor) or first.__tensor_flatten__()[0] != names:
        return [], names
    rows = tensor.shape[0]
    sliced: list[str] = []
    others: list[str] = []
    for name in names:
        inner = getattr(tensor, name)
        part = getattr(first, name).shape
        is_sliced = part != inner.shape or (rows == 1 and part[:1] == (1,))
        has_rows = part[:1] == (1,) and inner.shape == (rows, *part[1:]) and inner.is_contiguous()
        if torch_internals.is_wrapper(inner) or (is_sliced and not has_rows):
            return [], names
        (sliced if is_sliced else others).append(name)
    return sliced, others


def description_of(full: torch.Tensor) -> str:
    """Returns a text that is the same on all ranks if they can gather ``full`` together."""
    names, others = _names_of(full)
    kinds = {n: (list(t.shape), t.dtype) for n in names + others for t in [getattr(full, n)]}
    sums = {name: checksum(getattr(full, name)) for name in others}
    return f"{type(full.detach()).__name__} of {kinds}, checksums {sums}"


def check_param_dtype(fqn: str, full: nn.Parameter, param_dtype: torch.dtype | None) -> None:
    """Raises NotImplementedError if ``full``, made of rows, would be cast to be computed with."""
    if param_dtype not in (None, full.dtype):
        raise NotImplementedError(
            f"'{fqn}' is a {type(full.detach()).__name__} of {full.dtype}, which param_dtype="
            f"{param_dtype} does not cast: convert the model before it is quantized, or shard the "
            "parameter's module without param_dtype"
        )


def chunk_of_rows(
    full: torch.Tensor, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """Returns a copy of this rank's rows of ``full``, in the layout of torch.chunk."""
    rank, world_size = group.rank(), group.size()
    names, others = _names_of(full)
    parts = {name: getattr(full, name) for name in others}
    for name in names:
        chunks = getattr(full, name).chunk(world_size)
        parts[name] = chunks[rank] if rank < len(chunks) else getattr(full, name)[:0]
    # By the inner tensors: the subclass's own clone() and to() may compute.
    inner = {name: part.to(device, copy=True) for name, part in parts.items()}
    cls: Any = type(full)
    attributes = full.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    shape = (inner[names[0]].shape[0], *full.shape[1:])
    chunk: torch.Tensor = cls.__tensor_unflatten__(inner, attributes, shape, full.stride())
    return chunk


class InnerTensors:
    """All-gather extensions of one parameter, which gather its inner tensors.

    Args:
        full: the whole parameter, which is made of rows.
    """

    needed = "the inner tensors or attributes"

    def __init__(self, full: nn.Parameter) -> None:
        self._class: Any = type(full.detach())
        self._attributes = full.__tensor_flatten__()[1]  # type: ignore[attr-defined]
        self._names, self._others = _names_of(full)
        self._shape, self._stride = full.shape, full.stride()

    def takes(self, local: torch.Tensor) -> bool:
        """Returns whether ``local`` is made as the parameter was."""
        if type(local) is not self._class:
            return False
        names, attributes = local.__tensor_flatten__()  # type: ignore[attr-defined]
        return {*names} == {*self._names, *self._others} and bool(attributes == self._attributes)

    def pre_all_gather(
        self, local: torch.Tensor, handle: _C.Parameter
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Returns the inner tensors that are gathered, with as many rows on all ranks, and others.

        Args:
            local: this rank's rows of the parameter.
            handle: the parameter in the C++ runtime.
        """
        chunk_rows = -(-handle.sizes[0] // handle.world_size)
        inputs = []
        for name in self._names:
            rows: torch.Tensor = getattr(local, name)
            if rows.shape[0] < chunk_rows:
                short, rows = rows, rows.new_zeros(chunk_rows, *rows.shape[1:])
                rows[: short.shape[0]] = short
            inputs.append(rows)
        return tuple(inputs), tuple(getattr(local, name) for name in self._others)

    def post_all_gather(
        self, gathered: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Returns the whole parameter."""
        inner = dict(zip(self._others, others, strict=True))
        for name, rows in zip(self._names, gathered, strict=True):
            inner[name] = rows[: self._shape[0]]
        full: torch.Tensor = self._class.__tensor_unflatten__(
            inner, self._attributes, self._shape, self._stride
        )
        return full
