"""The box of each parameter that each rank has, whichever way the parameter is laid out.

::

    full      [rows, ...]   one tensor, which no rank has
    box       a range of each dimension of the full tensor: this rank's local tensor
    source    the one rank that sends, or writes, a box that several ranks have

Rows, columns, tensor parallelism, replicas and owners differ in their boxes alone. Streams and
files therefore treat them alike.
"""

import hashlib
import json
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.names import plain_name
from deepcompile_zero3.transport.json_collectives import all_gather_json
from deepcompile_zero3.transport.on_all_ranks import ErrorOnARank, line_of
from deepcompile_zero3.transport.rank_names import rank_names

# ``mesh.mesh`` is computed anew whenever it is read: it took half of the time of `entries_of`.
_ranks: weakref.WeakKeyDictionary[DeviceMesh, frozenset[int]] = weakref.WeakKeyDictionary()


class Box(NamedTuple):
    """A range of each dimension of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the view of ``full`` that the box is."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != full.shape[dim]:
                full = full.narrow(dim, offset, size)
        return full


@dataclass(frozen=True, eq=False)
class Entry:
    """A parameter or a buffer, and the ranks that have its parts.

    Attributes:
        name: its first name in ``model.named_parameters()`` or ``named_buffers()``, without what
            wrappers put into it.
        shape: shape of the full tensor.
        dtype: dtype in which it travels.
        local: this rank's local tensor, in the dtype of the parameter.
        box: this rank's box, perhaps without elements.
        sources: the boxes that make up the full tensor, each with the rank that sends it.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    local: torch.Tensor
    box: Box
    sources: tuple[tuple[int, Box], ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes of the full tensor as it travels."""
        return self.shape.numel() * self.dtype.itemsize


def entries_of(
    what: str,
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype | None,
    buffers: bool,
    arguments: Sequence[Any] = (),
) -> list[Entry]:
    """Returns the parameters of ``model``, and its persistent buffers if asked. Collective.

    Args:
        what: name of the call, for messages.
        model: the model; tied parameters come once, under the first of their names.
        group: process group of all ranks that have parts.
        dtype: dtype in which floating tensors travel, or None for their own.
        buffers: whether persistent buffers follow the parameters.
        arguments: arguments of the call, which must be equal on all ranks.

    Raises:
        Zero3Error: ranks disagree on names, shapes, dtypes or arguments; or a parameter has a
            layout, a device or a class that cannot be taken apart.
    """

    tensors: list[tuple[str, torch.Tensor]] = []
    boxes: list[Box] = []
    described: list[Any] = [list(arguments)]
    error = ""
    try:
        tensors = named_tensors(model, buffers)
        boxes = [box_of(name, tensor, group) for name, tensor in tensors]
    except Exception as raised:
        error = line_of(raised)
    dtypes = [
        dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        for _, tensor in tensors
    ]
    for (name, tensor), each in zip(tensors, dtypes, strict=True):
        described.append([name, list(tensor.shape), str(each)])
    # Errors and digests in one exchange: a message takes as long as a bucket of some megabytes.
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    said = all_gather_json(what, [error, digest], group)
    for why, _ in said:
        if why:
            raise ErrorOnARank(why)
    if any(theirs != digest for _, theirs in said):
        _check_alike(what, described, group)
    entries = []
    everyones = _all_gather_boxes(boxes, group)
    for index, ((name, tensor), box, travels_in) in enumerate(
        zip(tensors, boxes, dtypes, strict=True)
    ):
        # Ranks have other values of what is not sharded: all of it is that of one rank.
        turn = index if isinstance(tensor, DTensor) else 0
        sources = _sources(what, name, tensor.shape, [ranks[index] for ranks in everyones], turn)
        local = local_of(tensor)
        entries.append(Entry(name, tensor.shape, travels_in, local, box, sources))
    return entries


def named_tensors(model: nn.Module, buffers: bool) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters of ``model``, and its persistent buffers if asked, each once.

    Names are those of the model without wrappers.
    """
    tensors: list[tuple[str, torch.Tensor]] = [
        (plain_name(name), each) for name, each in model.named_parameters()
    ]
    if buffers:
        first: dict[int, tuple[str, torch.Tensor]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            for own, each in torch_internals.persistent_buffers(module):
                first.setdefault(id(each), (plain_name(f"{name}.{own}" if name else own), each))
        tensors += first.values()
    return tensors


def box_of(name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> Box:
    """Returns the box of a parameter or buffer that this rank has.

    Raises:
        Zero3Error: see :func:`entries_of`.
    """
    local = local_of(tensor)
    if local.device.type == "meta":
        raise Zero3Error(
            f"'{name}' is on the meta device: call model.to_empty(device=...) first, and give it "
            "values"
        )
    if torch_internals.is_wrapper(local):
        raise Zero3Error(
            f"'{name}' is a {type(local).__name__}, a tensor subclass, which cannot be "
            "taken apart by its elements: save model.state_dict() with "
            "torch.distributed.checkpoint instead"
        )
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    mesh, placements = tensor.device_mesh, tensor.placements
    outside = _ranks_of(mesh) - {*dist.get_process_group_ranks(group)}
    if outside:
        raise Zero3Error(
            f"'{name}' has parts on ranks {sorted(outside)}, which are not in the process group: "
            "pass group=, one of all ranks that share the model"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # another rank owns it
        return Box((0,) * tensor.dim(), (0,) * tensor.dim())
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for i in _order_of_sharding(name, mesh, placements):
        dim, parts = placements[i].dim, mesh.size(i)  # type: ignore[attr-defined]
        chunk = -(-sizes[dim] // parts)  # as torch.chunk
        start = min(chunk * coordinate[i], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    if tuple(sizes) != tuple(local.shape):
        raise Zero3Error(
            f"the local tensor of '{name}' has shape {list(local.shape)} and should have "
            f"{sizes}, by its placements {placements} over {mesh}"
        )
    return Box(tuple(offsets), tuple(sizes))


def _ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    if mesh not in _ranks:
        _ranks[mesh] = frozenset(mesh.mesh.flatten().tolist())
    return _ranks[mesh]


def _order_of_sharding(
    name: str, mesh: DeviceMesh, placements: Sequence[Placement]
) -> Sequence[int]:
    """Returns the mesh dimensions that shard a tensor, those first that were sharded first."""
    order: list[int] = []
    for i in reversed(range(mesh.ndim)):
        placement: Any = placements[i]
        if isinstance(placement, Replicate):
            continue
        strided = isinstance(placement, torch_internals.StridedShard)
        if not strided and not isinstance(placement, Shard):
            raise Zero3Error(
                f"'{name}' is placed as {placements}: redistribute it to Shard or Replicate "
                "placements first"
            )
        position, parts = 0, 1
        wanted = placement.split_factor if strided else 1
        while parts != wanted and position < len(order):
            j = order[position]
            parts *= mesh.size(j) if placements[j].dim == placement.dim else 1  # type: ignore[attr-defined]
            position += 1
        if parts != wanted:
            raise Zero3Error(f"'{name}' is placed as {placements}, which is no box of it")
        order.insert(position, i)
    return order


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, or a plain tensor itself, without gradients."""
    local = torch_internals.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _check_alike(what: str, mine: list[Any], group: dist.ProcessGroup) -> None:
    names = rank_names(group)
    own = names[dist.get_rank(group)]
    for name, theirs in zip(names, all_gather_json(what, mine, group), strict=True):
        for one, other in zip([*mine, None], [*theirs, None], strict=False):
            if one != other:
                raise Zero3Error(
                    f"{what}: rank {own} has {one} where rank {name} has {other}: "
                    "call it with the same arguments and the same model on all ranks"
                )


def _all_gather_boxes(boxes: Sequence[Box], group: dist.ProcessGroup) -> list[list[Box]]:
    """Returns the boxes of all ranks, by rank. Collective."""
    numbers = [number for box in boxes for number in (*box.offsets, *box.sizes)]
    device = torch_internals.device_of_objects(group)
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyones = mine.new_empty(dist.get_world_size(group), len(numbers))
    if numbers:
        dist.all_gather(list(everyones), mine, group=group)
    result = []
    for row in everyones.tolist():
        theirs, rest = [], iter(row)
        for box in boxes:
            offsets, sizes = (tuple(next(rest) for _ in box.sizes) for _ in range(2))
            theirs.append(Box(offsets, sizes))
        result.append(theirs)
    return result


def _sources(
    what: str, name: str, shape: torch.Size, boxes: Sequence[Box], turn: int
) -> tuple[tuple[int, Box], ...]:
    """Returns each box once, with one of the ranks that have it: which one is by ``turn``."""
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(boxes):
        if box.numel:
            holders.setdefault(box, []).append(rank)
    if sum(box.numel for box in holders) != shape.numel():
        raise Zero3Error(
            f"{what}: the parts {list(holders)} that ranks have of '{name}' do not make up its "
            f"shape {list(shape)}: pass group=, one of all ranks that share the model"
        )
    return tuple((ranks[turn % len(ranks)], box) for box, ranks in sorted(holders.items()))
