"""Which rank has what of a parameter: placements of DTensors, and the rows that the runtime knows.

::

    what a module reads   [*sizes]           a plain tensor, or a DTensor over ``inner``'s ranks
    whole                 [rows, ...]        this rank's part of that, the sharded dimension first
    shard                 [shard_rows, ...]  its rows on this rank, in the layout of torch.chunk
    the parameter         [*sizes]           a DTensor over all ranks, whose local tensor is a shard
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from deepcompile_zero3 import torch_internals


class DataParallel:
    """The ranks that compute on different data, with the same parameters.

    Attributes:
        mesh: [shard], or [replicate, shard]: parameters are sharded over its last dimension.
        shard_group: that dimension's ranks.
        replicate_group: those that have the same shards, if there are others.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.shard_group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
        self.replicate_group: dist.ProcessGroup | None = (
            mesh.get_group(0) if mesh.ndim > 1 and mesh.size(0) > 1 else None
        )

    @property
    def device(self) -> torch.device:
        """The one that this rank computes on."""
        device = torch.device(self.mesh.device_type)
        if device.type == "cpu":
            return device
        return torch.device(device.type, torch.accelerator.current_device_index())


class Inner(NamedTuple):
    """A DTensor that each of the ranks has which compute on different data."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How one parameter lies on the ranks.

    Attributes:
        ranks: over which it is sharded.
        dim: the dimension of the parameter that is.
        mesh: of the DTensor.
        placements: of it.
        inner: what each of ``ranks`` reads, if that is a DTensor itself.
    """

    ranks: DataParallel
    dim: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    inner: Inner | None = None

    @staticmethod
    def of(parameter: torch.Tensor, ranks: DataParallel, dim: int = 0) -> "Layout":
        """That of ``parameter``, sharded by ``dim`` over ``ranks``.

        Raises:
            RuntimeError: it is a DTensor whose mesh is not of one mesh with that of ``ranks``.
        """
        replicate = (Replicate(),) * (ranks.mesh.ndim - 1)
        if not isinstance(parameter, DTensor):
            return Layout(ranks, dim, ranks.mesh, (*replicate, Shard(dim)))
        inner = Inner(
            parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        )
        parts = math.prod(
            inner.mesh.size(i)
            for i, p in enumerate(inner.placements)
            if getattr(p, "dim", None) == dim
        )
        mesh = torch_internals.concatenate_meshes([ranks.mesh, inner.mesh])
        # What the inner ranks have of the dimension is sharded, not the dimension.
        shard = torch_internals.StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim)
        return Layout(ranks, dim, mesh, (*replicate, shard, *inner.placements), inner)

    def whole(self, full: torch.Tensor) -> torch.Tensor:
        """What the runtime gathers of ``full``, which is as a module reads it."""
        if isinstance(full, DTensor) and self.inner is not None:
            full = full.redistribute(self.inner.mesh, self.inner.placements)
            return self.rows(torch_internals.local_tensor(full))
        return self.rows(full)

    def read(self, whole: torch.Tensor) -> torch.Tensor:
        """What a module reads, of what was gathered. Differentiable."""
        full = self.local(whole)
        if self.inner is None:
            return full
        return DTensor.from_local(
            full,
            self.inner.mesh,
            self.inner.placements,
            run_check=False,
            shape=self.inner.shape,
            stride=self.inner.stride,
        )

    def rows(self, local: torch.Tensor) -> torch.Tensor:
        """A view of a local tensor, the sharded dimension first."""
        return local.movedim(self.dim, 0) if self.dim else local

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        """The opposite."""
        return rows.movedim(0, self.dim) if self.dim else rows

    def shard(self, full: torch.Tensor) -> DTensor:
        """This rank's rows of ``full``, copied, so that it can be freed."""
        whole = self.whole(full.detach())
        group = self.ranks.shard_group
        chunks = whole.chunk(dist.get_world_size(group))
        rank = dist.get_rank(group)
        rows = self.local(chunks[rank] if rank < len(chunks) else whole[:0])
        target = whole.device if whole.is_meta else self.ranks.device
        local = torch.empty(rows.shape, dtype=whole.dtype, device=target).copy_(rows)
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=full.shape,
            stride=torch.empty(full.shape, device="meta").stride(),
        )
