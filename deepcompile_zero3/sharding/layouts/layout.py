"""Layout of a parameter over the ranks: DTensor placements, and the runtime's rows.

::

    value       [*sizes]           read by a module: a plain tensor, or a DTensor over ``inner``
    full        [rows, ...]        this rank's part of the value, the sharded dimension first
    shard       [shard_rows, ...]  this rank's rows of ``full``, in the layout of torch.chunk
    parameter   [*sizes]           a DTensor over all ranks, whose local tensor is a shard

A scalar has no rows to shard, nor has a parameter without elements. Each rank has all of it, as a
row of its own::

    full        [world, numel]     one equal row for each rank; a module reads the first
    shard       [1, numel]         this rank's row
    parameter   [*sizes]           a replicated DTensor

The gradient goes to all rows, so that each rank gets the sum over the ranks.

One rank may own all of a parameter: see ``owned``. The others have a shard without rows.
"""

import abc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.layouts.checksum import checksum
from deepcompile_zero3.sharding.layouts.first_of_equal import FirstOfEqual
from deepcompile_zero3.sharding.layouts.mesh_of_few import MeshOfFew, adopt
from deepcompile_zero3.sharding.source import kind_of

if TYPE_CHECKING:
    from deepcompile_zero3.sharding.model import ShardedModel


class DataParallelRanks:
    """The ranks that compute on different data with the same parameters.

    Attributes:
        mesh: [shard] or [replicate, shard]. Parameters are sharded over its last dimension.
        shard_group: process group of that dimension.
        replicate_group: process group of the ranks with the same shard, or None if there is only
            one.
        meshes_of_few: meshes that a feature makes for parameters on some of these ranks, by the
            rank of ``shard_group`` that has them.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.shard_group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
        self.replicate_group: dist.ProcessGroup | None = (
            mesh.get_group(0) if mesh.ndim > 1 and mesh.size(0) > 1 else None
        )
        self.meshes_of_few: dict[int, MeshOfFew] = {}

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups of the shards and, if there are any, of the replicas."""
        return tuple(filter(None, (self.shard_group, self.replicate_group)))

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        device = torch.device(self.mesh.device_type)
        if device.type == "cpu":
            return device
        return torch.device(device.type, torch.accelerator.current_device_index())


class Inner(NamedTuple):
    """The DTensor of a parameter on each data-parallel rank, such as one of tensor parallelism.

    ``grad_placements`` are the placements of gradients that the runtime takes, if they differ from
    ``placements``.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    grad_placements: tuple[Placement, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """Layout of one parameter over the ranks.

    Attributes:
        ranks: the ranks that it is sharded over.
        dim: the dimension that is sharded, or None if all ranks have the full parameter.
        mesh: mesh of the sharded DTensor.
        placements: placements of the sharded DTensor.
        inner: the DTensor that each of ``ranks`` reads, or None if that is a plain tensor.
        sizes: shape of the local tensor, if ``dim`` is None or the parameter has an owner.
        owner: the rank of ``ranks.shard_group`` that has the full parameter, or None if each has
            a shard.
        offload: the policy under which shards and gradients are in host memory, or None if they
            are on the device that computes.
    """

    ranks: DataParallelRanks
    dim: int | None
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    inner: Inner | None = None
    sizes: torch.Size = torch.Size()  # noqa: RUF009 (immutable)
    owner: int | None = None
    offload: CPUOffloadPolicy | None = None

    @staticmethod
    def of(parameter: torch.Tensor, ranks: DataParallelRanks, dim: int | None = 0) -> "Layout":
        """Returns the layout of ``parameter``, sharded on dimension ``dim`` over ``ranks``.

        If ``dim`` is None, it is replicated.

        Raises:
            RuntimeError: ``parameter`` is a DTensor, and its mesh and that of ``ranks`` are not
                slices of one mesh.
        """
        replicate = (Replicate(),) * (ranks.mesh.ndim - 1)
        if not isinstance(parameter, DTensor):
            placement: Placement = Replicate() if dim is None else Shard(dim)
            return Layout(ranks, dim, ranks.mesh, (*replicate, placement), None, parameter.shape)
        inner = Inner(
            parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        )
        mesh = torch_internals.concatenate_meshes([ranks.mesh, inner.mesh])
        placement = placement_over(dim, inner, range(inner.mesh.ndim))
        sizes = torch_internals.local_tensor(parameter).shape
        return Layout(ranks, dim, mesh, (*replicate, placement, *inner.placements), inner, sizes)

    def full(self, value: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part [rows, ...] of ``value``, which the runtime gathers."""
        if isinstance(value, DTensor) and self.inner is not None:
            placements = self.inner.placements
            if self.inner.grad_placements is not None:  # each rank's part of a gradient stays
                placements = tuple(
                    mine if grad.is_partial() else read
                    for mine, grad, read in zip(
                        value.placements, self.inner.grad_placements, placements, strict=True
                    )
                )
            value = torch_internals.local_tensor(value.redistribute(self.inner.mesh, placements))
        rows = self.rows(value)
        return rows if self.dim is not None else rows.expand(self.ranks.shard_group.size(), -1)

    def full_like(self, parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Returns a meta tensor like the full one [rows, ...] that ``parameter`` has in a forward.

        It has strides in the order of the parameter's dimensions, without its gaps, and ``dtype``
        if that is given and the parameter is of a floating dtype.
        """
        dtype = dtype if parameter.is_floating_point() else None
        full = self.full(parameter.detach())
        if torch_internals.is_wrapper(full):
            return torch.empty(full.shape, dtype=dtype or full.dtype, device="meta")
        return torch.empty_like(full, dtype=dtype, device="meta")

    def value_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the value that a module reads, from the gathered ``full``. Differentiable."""
        # Either is a single node of autograd, which keeps the leaf's contract.
        value = FirstOfEqual.apply(full, self.sizes) if self.dim is None else self.local(full)
        if self.inner is None:
            return value
        grads = self.inner.grad_placements
        return DTensor.from_local(
            value,
            self.inner.mesh,
            self.inner.placements,
            run_check=False,
            shape=self.inner.shape,
            stride=self.inner.stride,
            **({} if grads is None else {"grad_placements": grads}),
        )

    def is_local_part(self, registered: object, local: torch.Tensor) -> bool:
        """Returns whether a module registers ``shard.to_local()`` in place of a shard.

        Expert parallelism of transformers registers local tensors while experts compute. Only a
        parameter that is read as a DTensor has one.

        Args:
            registered: the object that the module registers, which is not a DTensor.
            local: the local tensor of the shard.
        """
        return (
            self.inner is not None
            and isinstance(registered, torch.Tensor)
            and torch_internals.storage_address(registered)
            == torch_internals.storage_address(local)
            and (registered.shape, registered.stride()) == (local.shape, local.stride())
            and registered.dtype == local.dtype
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether another rank owns the parameter."""
        return self.owner is not None and self.owner != self.ranks.shard_group.rank()

    def row_layout(self, rows: int) -> _C.RowLayout:
        """Returns which of the ``rows`` of the full tensor each rank has."""
        world_size = self.ranks.shard_group.size()
        if self.owner is None:
            return _C.RowLayout.chunked(rows, world_size)
        before = self.owner + 1  # rank r begins at offset r
        return _C.RowLayout.by_offsets([0] * before + [rows] * (world_size + 1 - before))

    def shard_rows(self, local: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows [shard_rows, ...], from the local tensor of the shard."""
        # torch gives [0] to ranks that are not in a mesh. A view shares the version of its base.
        return local.view(0, *self.sizes[1:]) if self.is_elsewhere else self.rows(local)

    def rows(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a view of a local tensor with the sharded dimension first."""
        if self.dim is None:
            return local.view(1, local.numel())
        return local.movedim(self.dim, 0) if self.dim else local

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns a view of ``rows`` with the sharded dimension at its own place."""
        if self.dim is None:
            return rows.view(self.sizes)
        return rows.movedim(0, self.dim) if self.dim else rows

    def shard(self, value: torch.Tensor) -> DTensor:
        """Returns a DTensor with a copy of this rank's rows of ``value``, which may be freed."""
        full = self.full(value.detach())
        target = full.device if full.is_meta else self.device
        kind = kind_of(full)
        copied = None if kind is None else kind.chunk(full, self.ranks.shard_group, target)
        if copied is not None:
            rows = copied
        elif self.owner is None:
            rows = self.local(self.part_of(full))
        else:
            rows = full[:0] if self.is_elsewhere else full
        like = DTensor.from_local(  # would move other tensors to the mesh's device
            torch.empty(rows.shape, dtype=full.dtype, device="meta"),
            self.mesh,
            self.placements,
            run_check=False,
            shape=value.shape,
            stride=torch.empty(value.shape, device="meta").stride(),
        )
        if copied is not None:
            local = copied
        elif torch_internals.is_wrapper(rows):
            # Not clone(): NF4Tensor would quantize again.
            options: Any = {} if rows.device == target else {"device": target}
            local = rows.new_zeros(rows.shape, **options).copy_(rows)
        else:
            settings: Any = {
                "dtype": full.dtype,
                "device": target,
                "pin_memory": self._pins(target),
            }
            local = torch.empty(rows.shape, **settings).copy_(rows)
        shard = torch_internals.with_spec(local, torch_internals.spec_of(like))
        adopt(shard)
        return shard

    @property
    def device(self) -> torch.device:
        """The device of this rank's shard."""
        return self.ranks.device if self.offload is None else torch.device("cpu")

    def pinned(self, local: torch.Tensor) -> torch.Tensor:
        """Returns ``local``, in page-locked memory if shards are offloaded to such."""
        return local.pin_memory() if local.numel() and self._pins(local.device) else local

    def _pins(self, device: torch.device) -> bool:
        return device.type == "cpu" and self.offload is not None and self.offload.pin_memory

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh [shard] of the ranks that have the shards."""
        mesh = self.ranks.mesh
        return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of ``full``, in the layout of torch.chunk."""
        return chunk_of(full, self.ranks.shard_group)

    # ---- what replicas have, if not the same

    def connect_replicas(self, source: _C.Source, replicas: _C.Channel) -> None:
        """Tells a new source in the runtime which part of its shard each replica has."""

    def join(self, model: "ShardedModel", handle: _C.Parameter) -> None:
        """Takes note of the model that the parameter ``handle`` is one of now."""

    def value_of_replica(self, local: torch.Tensor) -> int | None:
        """Returns a hash that has to be the same on all replicas, or None if anything may be.

        ``local`` is the local tensor of the parameter.
        """
        return checksum(local)

    @property
    def described(self) -> str:
        """What ranks have to agree on beside the placements."""
        return f"owner={self.owner}"


def chunk_of(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns this rank's part of ``rows`` among the ranks of ``group``, as torch.chunk cuts."""
    chunks = rows.chunk(group.size())
    return chunks[group.rank()] if group.rank() < len(chunks) else rows[:0]


class MakesLayout(abc.ABC):
    """A result of ``shard_placement_fn`` that makes the layout itself."""

    @abc.abstractmethod
    def layout_of(
        self, fqn: str, parameter: nn.Parameter, ranks: DataParallelRanks, is_on_mesh: bool
    ) -> Layout:
        """Returns the layout of ``parameter``.

        Args:
            fqn: the name of the parameter, for messages.
            parameter: the parameter as the user built it.
            ranks: the ranks that it is sharded over.
            is_on_mesh: whether ``dp_mesh_dims`` says that all parameters are DTensors on one mesh.
        """


def placement_over(dim: int | None, inner: Inner, mesh_dims: range) -> Placement:
    """Returns the placement that shards dimension ``dim``, if any, of each part of ``inner``.

    ``mesh_dims`` are the dimensions of the inner mesh that come after the new one.
    """
    if dim is None:
        return Replicate()
    parts = math.prod(
        inner.mesh.size(i) for i in mesh_dims if getattr(inner.placements[i], "dim", None) == dim
    )
    return torch_internals.StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim)
