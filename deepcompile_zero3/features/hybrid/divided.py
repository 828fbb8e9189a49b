"""Parameters whose replicas have a part each, which their optimizers step.

On a mesh [replicate, shard], ranks of a row compute from shards that the row gathers, and ranks of
a column have the same shard. Each of these keeps and steps a part of it::

    value   [*sizes]            read by a module
    shard   [shard_rows, ...]   one for each column, in the dtype that is computed with
    part    [part_rows, ...]    one for each rank: the parameter, a DTensor over both dimensions

Gradients are reduce-scattered over the row, and then over the column. After a step the first
forward gathers the shards over the columns, once. So the optimizer's states are sharded over all
ranks, and each byte of a parameter and of a gradient crosses between rows once a step.
"""

import dataclasses
import weakref
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.layouts.checksum import checksum
from deepcompile_zero3.sharding.layouts.layout import DataParallelRanks, Layout, chunk_of
from deepcompile_zero3.sharding.model import ShardedModel
from deepcompile_zero3.sharding.source import kind_of


def divide(fqn: str, parameter: nn.Parameter, layout: Layout) -> Layout:
    """Returns ``layout`` with shards that replicas have in parts.

    A layout without replicas stays as it is, and so does one in which all ranks or one rank have
    the whole parameter.

    Args:
        fqn: the name of the parameter, for messages.
        parameter: the parameter as the user built it.
        layout: its layout over the mesh.

    Raises:
        NotImplementedError: the parameter is a DTensor or another tensor subclass.
    """
    ranks = layout.ranks
    if ranks.replicate_group is None or layout.dim is None or layout.owner is not None:
        return layout
    if isinstance(parameter, DTensor) or kind_of(parameter) is not None:
        raise NotImplementedError(
            f"'{fqn}' is a {type(parameter).__name__}, a tensor subclass, whose shards replicas "
            "cannot have in parts yet: call fully_shard without shard_optimizer_over_replicas for "
            "its module"
        )
    if layout.offload is not None:
        raise NotImplementedError(
            f"the shard of '{fqn}' is offloaded, and replicas cannot have it in parts yet: leave "
            "out offload_policy or shard_optimizer_over_replicas"
        )
    placements = (Shard(layout.dim), Shard(layout.dim))
    divided = DividedLayout(ranks, layout.dim, _mesh_of(ranks), placements, sizes=layout.sizes)
    with torch.no_grad():
        rows = divided.rows(parameter.detach())
        initial = checksum(divided.shard_of(rows)), checksum(divided.part_of(rows))
    return dataclasses.replace(divided, initial=initial)


# The argument of ``fully_shard``, and what it does to a layout.
OVER_REPLICAS = ("shard_optimizer_over_replicas", divide)


@dataclasses.dataclass(frozen=True)
class DividedLayout(Layout):
    """A layout of parts. Its mesh has the dimensions of the user's in the order of division.

    Attributes:
        initial: checksums of the shard and of this rank's part, as the user built them.
    """

    initial: tuple[int | None, int | None] = (None, None)

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the rows of ``full`` that this rank's replicas have together."""
        return super().part_of(full)

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        """See :class:`Layout`."""
        replicas = cast(dist.ProcessGroup, self.ranks.replicate_group)
        return chunk_of(self.shard_of(full), replicas)

    @property
    def described(self) -> str:
        """See :class:`Layout`."""
        return "in parts over replicas"

    def connect_replicas(self, source: _C.Source, replicas: _C.Channel) -> None:
        """See :class:`Layout`."""
        _C.give_parts(source, replicas)

    def join(self, model: ShardedModel, handle: _C.Parameter) -> None:
        """See :class:`Layout`."""
        parts = next((w for w in model.watchers if isinstance(w, _C.PartsOfModel)), None)
        if parts is None:
            model.watchers.append(parts := _C.PartsOfModel())
        parts.add(handle)

    def value_of_replica(self, local: torch.Tensor) -> int | None:
        """See :class:`Layout`. Replicas that were loaded since have one value: that of all parts.

        Args:
            local: the local tensor of the parameter, a part.
        """
        shard, part = self.initial
        return shard if checksum(local) == part else None


_meshes: weakref.WeakKeyDictionary[DataParallelRanks, DeviceMesh] = weakref.WeakKeyDictionary()


def _mesh_of(ranks: DataParallelRanks) -> DeviceMesh:
    """Returns the mesh [shard, replicate] of ``ranks``: a shard is divided, not the parameter."""
    if (known := _meshes.get(ranks)) is not None:
        return known
    mesh = ranks.mesh
    names = mesh.mesh_dim_names or ("replicate", "shard")
    groups = [ranks.shard_group, cast(dist.ProcessGroup, ranks.replicate_group)]
    _meshes[ranks] = DeviceMesh.from_group(
        groups, mesh.device_type, mesh=mesh.mesh.t().contiguous(), mesh_dim_names=names[::-1]
    )
    return _meshes[ranks]
