"""A state that each rank has its own of, as one tensor of a checkpoint: the bytes of each rank."""

import json
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.owned.owned import OwnedTensor

# The key of bytes of each rank, in place of a state. torch's errors have it in the state's name. A
# dot would divide it, where torch flattens state dicts.
BY_RANK = "by rank: load on as many ranks"


class Missing:
    """Stands for a state that a rank does not have."""


@dataclass(frozen=True)
class Description:
    """A description of a tensor that ranks tell each other."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    is_like: bool  # it has the shape of the rank's shard
    is_plain: bool  # not of a subclass of Tensor
    number: Any = None  # its value, if ranks have to have the same

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def header(self) -> bytes:
        """The line ahead of the tensor's bytes."""
        return json.dumps([self._dtype_name, self.device, self.shape]).encode() + b"\n"

    @property
    def nbytes(self) -> int:
        """Bytes with the header."""
        return len(self.header) + math.prod(self.shape) * self.dtype.itemsize

    def encoded(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return {**vars(self), "dtype": self._dtype_name}

    @classmethod
    def decoded(cls, fields: dict[str, Any]) -> "Description":
        """Returns the description with these fields of JSON."""
        dtype, shape = getattr(torch, fields["dtype"]), tuple(fields["shape"])
        return cls(**{**fields, "dtype": dtype, "shape": shape})


NO_BYTES = b"null\n"  # the header of a state that a rank does not have


def sharded_dims(parameter: torch.Tensor) -> list[int]:
    """Returns the dimensions of the mesh that ``parameter`` is sharded over."""
    if not isinstance(parameter, DTensor) or isinstance(parameter, OwnedTensor):
        return []
    return [dim for dim, each in enumerate(parameter.placements) if not each.is_replicate()]


def _shape_by_rank(parameter: DTensor) -> tuple[int, ...]:
    """Returns the first dimensions of states by rank.

    One of them is left after sharding, so that no rank takes rows of another number of ranks.
    """
    sizes = [parameter.device_mesh.size(dim) for dim in sharded_dims(parameter)]
    return (*sizes, math.prod(sizes) + 1)


def packed(parameter: DTensor, header: bytes, value: Any, nbytes: int) -> DTensor:
    """Returns a state by rank: uint8 [*ranks, number of ranks + 1, bytes].

    Args:
        parameter: the parameter, which is sharded.
        header: the first bytes of this rank's.
        value: its state, a plain tensor, or ``Missing``.
        nbytes: the bytes of the rank that has most.
    """
    *sizes, columns = _shape_by_rank(parameter)
    mine = torch.zeros(-(-nbytes // columns) * columns, dtype=torch.uint8)
    mine[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    mine = mine.to(device_of(parameter))
    if value is not Missing:
        content = value.detach().contiguous().reshape(-1).view(torch.uint8)
        mine[len(header) : len(header) + content.numel()].copy_(content)
    dims = iter(range(len(sizes)))
    placements = [
        Replicate() if each.is_replicate() else Shard(next(dims)) for each in parameter.placements
    ]
    local = mine.view(*(1 for _ in sizes), columns, -1)
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False)


def unpacked(name: str, parameter: torch.Tensor, path: tuple[Any, ...], value: torch.Tensor) -> Any:
    """Returns this rank's state of a state by rank, or ``Missing``.

    Raises:
        Zero3Error: it is of another number of ranks. ``name`` and ``path`` say which it is.
    """
    dims = sharded_dims(parameter)
    expected = _shape_by_rank(cast(DTensor, parameter)) if dims else (1,)
    saved = tuple(value.shape)
    if saved[:-1] != expected or not dims:
        raise Zero3Error(
            f"state '{'.'.join(map(str, path))}' of {name} was saved by "
            f"{math.prod(saved[:-2])} ranks, each with its own, and is loaded by "
            f"{math.prod(expected[:-1])}: load it on as many ranks, or load the model alone and "
            "begin with a new optimizer"
        )
    if isinstance(value, DTensor):
        row = torch_internals.local_tensor(value)
    else:  # of a full state dict
        mesh = cast(DTensor, parameter).device_mesh
        row = value[tuple(mesh.get_local_rank(dim) for dim in dims)]
    row = row.reshape(-1)
    header = bytes(row[:4096].tolist()).partition(b"\n")[0]
    described = json.loads(header)
    if described is None:
        return Missing
    dtype_name, device, shape = described
    dtype = getattr(torch, dtype_name)
    begin = len(header) + 1
    content = row[begin : begin + math.prod(shape) * dtype.itemsize].clone()
    state = content.view(dtype).view(shape)
    return state.cpu() if device == "cpu" else state.to(device_of(parameter))


def device_of(parameter: torch.Tensor) -> torch.device:
    """Returns the device of the local tensor of a DTensor."""
    return torch_internals.local_tensor(cast(DTensor, parameter)).device
