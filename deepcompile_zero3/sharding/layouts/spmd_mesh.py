"""A mesh on which all parameters are DTensors: the ``dp_mesh_dims`` of ``fully_shard``."""

from torch.distributed.tensor import DeviceMesh, DTensor, Partial

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.sharding.layouts.layout import (
    DataParallelRanks,
    Inner,
    Layout,
    placement_over,
)
from deepcompile_zero3.transport.process_groups import flat_submesh


class SpmdMesh:
    """A mesh of all ranks on which parameters and activations are DTensors.

    Attributes:
        mesh: the mesh, with named dimensions.
        shard: indices of the dimensions that parameters are sharded over.
        replicate: indices of the dimensions of replicas.
    """

    def __init__(
        self, mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]
    ) -> None:
        names = mesh.mesh_dim_names or ()
        self.mesh = mesh
        self.shard = [i for i, name in enumerate(names) if name in shard]
        self.replicate = [i for i, name in enumerate(names) if name in replicate]
        # Ranks are in the mesh's order, whichever order names come in.
        flat = [
            flat_submesh(mesh, tuple(names[i] for i in dims))
            for dims in (self.replicate, self.shard)
            if dims
        ]
        self._shards = flat[-1]
        self.ranks = DataParallelRanks(torch_internals.concatenate_meshes(flat))

    def layout_of(self, parameter: DTensor, dim: int | None) -> Layout:
        """Returns the layout of ``parameter``, replicated on the data-parallel dimensions."""
        mine = {*self.shard, *self.replicate}
        inner = Inner(
            self.mesh,
            parameter.placements,
            parameter.shape,
            parameter.stride(),
            # Only the runtime sums the parts of these ranks.
            tuple(Partial() if i in mine else p for i, p in enumerate(parameter.placements)),
        )
        meshes, placements = [], []
        for i, placement in enumerate(parameter.placements):
            if i == self.shard[0]:
                meshes.append(self._shards)
                placements.append(placement_over(dim, inner, range(i + 1, self.mesh.ndim)))
            elif i not in self.shard:
                meshes.append(self.mesh[(self.mesh.mesh_dim_names or ())[i]])
                placements.append(placement)
        joins = len(self.shard) > 1  # several dimensions to one
        mesh = torch_internals.concatenate_meshes(meshes) if joins else self.mesh
        sizes = torch_internals.local_tensor(parameter).shape
        return Layout(self.ranks, dim, mesh, tuple(placements), inner, sizes)
