"""Which elements of a DTensor a rank has."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.digests.element_sums import Ranges


class KnownPlaces:
    """Places of DTensors, computed once for each layout: a digest has thousands of few layouts."""

    def __init__(self) -> None:
        self._lowest: dict[DeviceMesh, int] = {}
        self._places: dict[object, list[Ranges]] = {}

    def lowest_rank(self, tensor: DTensor) -> int:
        """Returns the lowest of the ranks in the mesh of ``tensor``."""
        mesh = torch_internals.spec_of(tensor).mesh
        if mesh not in self._lowest:
            self._lowest[mesh] = int(mesh.mesh.min())
        return self._lowest[mesh]

    def of(self, fqn: str, tensor: DTensor, sizes: Sequence[int]) -> list[Ranges]:
        """Returns :func:`places_of` these arguments."""
        spec = torch_internals.spec_of(tensor)
        layout = spec.mesh, spec.placements, tensor.shape, tuple(sizes)
        if layout not in self._places:
            self._places[layout] = places_of(fqn, tensor, sizes)
        return self._places[layout]


def is_counted(tensor: DTensor) -> bool:
    """Returns whether this rank's part counts: of replicas, those of the first ranks do."""
    spec = torch_internals.spec_of(tensor)
    coordinate = spec.mesh.get_coordinate()  # None on a rank that is not in the mesh
    return coordinate is not None and not any(
        at
        for at, placement in zip(coordinate, spec.placements, strict=True)
        if not _is_shard(placement)
    )


def places_of(fqn: str, tensor: DTensor, sizes: Sequence[int]) -> list[Ranges]:
    """Returns the indices in the full tensor that this rank has, by dimension.

    Args:
        fqn: name of the tensor, for messages.
        tensor: a DTensor that is not a partial sum, on a rank of its mesh.
        sizes: shape of its local tensor.

    Raises:
        Zero3Error: placements of a kind that is not known make another shape.
    """
    spec = torch_internals.spec_of(tensor)
    coordinate = spec.mesh.get_coordinate()
    places = []
    for dim, size in enumerate(tensor.shape):
        order: list[int] = []  # of mesh dimensions: which one divides first
        for mesh_dim in reversed(range(spec.mesh.ndim)):
            placement = spec.placements[mesh_dim]
            if _is_shard(placement) and placement.dim % tensor.dim() == dim:
                # Tensor parallelism divides before the ranks to its left, as DTensor writes it.
                is_strided = isinstance(placement, torch_internals.StridedShard)
                order.insert(len(order) if is_strided else 0, mesh_dim)
        ranges: Ranges = (range(size),)
        for mesh_dim in order:
            ranges = _chunk(ranges, coordinate[mesh_dim], spec.mesh.size(mesh_dim))
        places.append(ranges)
    found = [sum(map(len, ranges)) for ranges in places]
    if found != [*sizes]:
        raise Zero3Error(
            f"training_digest: this rank's part of '{fqn}' is {[*sizes]}, where placements "
            f"{spec.placements} of {[*tensor.shape]} over {spec.mesh} make it {found}: digests "
            "know Shard, Replicate and what fully_shard makes of tensor parallelism"
        )
    return places


def without_partial_sums(tensor: DTensor) -> DTensor:
    """Returns ``tensor`` with partial sums summed. Collective if it has any."""
    placements = torch_internals.spec_of(tensor).placements
    if not any(each.is_partial() for each in placements):
        return tensor
    summed = [Replicate() if p.is_partial() else p for p in placements]
    return tensor.redistribute(placements=summed)


def _is_shard(placement: Any) -> bool:
    return getattr(placement, "dim", None) is not None


def _chunk(ranges: Ranges, index: int, chunks: int) -> Ranges:
    """Returns a chunk of the indices in ``ranges``, as :func:`torch.chunk` makes it."""
    size = -(-sum(map(len, ranges)) // chunks)
    start, stop = index * size, (index + 1) * size
    result = []
    for each in ranges:
        some = each[max(start, 0) : max(stop, 0)]
        if some:
            result.append(some)
        start, stop = start - len(each), stop - len(each)
    return tuple(result) or (range(0),)
