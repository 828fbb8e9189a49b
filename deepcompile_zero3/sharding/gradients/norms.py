"""Norms of gradients whose parts lie on the ranks of any meshes."""

import functools
import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.placement_types import Placement

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.layouts.mesh_of_few import MeshOfFew

# Bytes of a tensor up to which a copy takes less time than operators on the tensor by itself.
SMALL = 16 << 10
_TOGETHER = 64  # small tensors that are copied to one for their norm

# The process groups that a tensor is sharded over, in the order of its mesh's dimensions.
ProcessGroups = tuple[dist.ProcessGroup, ...]


class GradientPart:
    """This rank's part of a parameter's gradient, as torch clips it.

    Attributes:
        dtype: dtype of the gradient, whether or not there is one.
        device: the device that the parameter is on.
        groups: the process groups that the parameter is sharded over.
        grad: the local tensor of the gradient, or None.
        summed: the same after partial sums are summed.
    """

    __slots__ = ("device", "dtype", "grad", "groups", "summed")

    def __init__(
        self, parameter: torch.Tensor, dtype: torch.dtype, groups_of: dict[int, ProcessGroups]
    ) -> None:
        """Collective if the gradient is a partial sum.

        Args:
            parameter: a parameter.
            dtype: see the attribute.
            groups_of: the process groups that are known, by the id of a DTensor's spec, which
                parameters of one shape share. Others are added.
        """
        self.dtype = dtype
        self.device = parameter.device
        grad = self.grad = self.summed = parameter.grad
        if not isinstance(parameter, DTensor):
            self.groups: ProcessGroups = ()
            return
        spec = torch_internals.spec_of(parameter)
        groups = groups_of.get(id(spec))
        if groups is None:
            groups = groups_of[id(spec)] = _groups_of(spec.mesh, spec.placements)
        self.groups = groups
        if grad is not None:
            grad = cast(DTensor, grad)
            self.grad = self.summed = torch_internals.local_tensor(grad)
            if torch_internals.spec_of(grad) is not spec:
                self.summed = torch_internals.local_gradient(parameter)


def total_norm(
    parts: Sequence[GradientPart], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """Returns the norm of the gradients of all ``parts``, each of them full. Collective.

    Order 0 counts the gradients that are not zero.
    """
    if not parts:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(_full_norms(parts, norm_type, foreach), norm_type)


def gradient_norm(parameter: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Returns the norm of the full gradient of ``parameter``, in float32 or wider. Collective.

    Order 0 counts the elements that are not zero. All ranks have the gradient.
    """
    gradient = cast(torch.Tensor, parameter.grad)
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    part = GradientPart(parameter, dtype.to_real(), {})
    part.summed = cast(torch.Tensor, part.summed).detach().to(dtype)
    return _full_norms([part], norm_type, None)[0]


def _full_norms(
    parts: Sequence[GradientPart], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """Returns norms whose norm is the norm of all ``parts``. With order 0, returns each part's.

    They are on the device of the first part, in the dtype that all promote to. Collective.
    """
    # Everything that ranks have to agree on is read from parameters: any gradient may be missing.
    dtype = functools.reduce(torch.promote_types, {part.dtype for part in parts})
    gradients: dict[tuple[torch.device, ProcessGroups], list[torch.Tensor]] = {}
    for part in parts:
        mine = part.summed
        if mine is None:
            mine = torch.empty(0, dtype=part.dtype, device=part.device)
        gradients.setdefault((part.device, part.groups), []).append(mine)
    norms = {
        (device, groups): [_local_norms(mine, norm_type, foreach).to(device, dtype)]
        for (device, groups), mine in gradients.items()
    }
    # The norm of norms is the norm of all. The innermost groups come first: their norms may join
    # those of another mesh in the next group.
    while (innermost := max(norms, key=lambda key: len(key[1])))[1]:
        device, groups = innermost
        mine = torch.cat(norms.pop(innermost))
        if norm_type != 0.0:
            mine = torch.linalg.vector_norm(mine, norm_type).reshape(1)
        joined = norms.setdefault((device, groups[:-1]), [])
        joined.append(_over_ranks(mine, norm_type, groups[-1]))
    device = parts[0].device
    return torch.cat([norm.to(device) for of_device in norms.values() for norm in of_device])


def _groups_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> ProcessGroups:
    """Returns the process groups that a DTensor is sharded over."""
    if isinstance(mesh, MeshOfFew):
        return (mesh.shard_group,)
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )


def _local_norms(
    tensors: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """Returns the norm of all ``tensors``, [1], or with order 0 of each, [tensors]."""
    if norm_type == 0.0:  # counts tensors that are not zero: ranks may have parts of the same one
        return torch.stack([torch.linalg.vector_norm(t, 0.0) for t in tensors])
    tensors_with_rows = [t for t in tensors if t.numel() > 0]  # others have no infinity norm
    if not tensors_with_rows:
        return tensors[0].new_full([1], math.inf if norm_type < 0 else 0.0)
    if foreach is not False:
        tensors_with_rows = _small_joined(tensors_with_rows, norm_type)
    return nn.utils.get_total_norm(tensors_with_rows, norm_type, foreach=foreach).reshape(1)


def _small_joined(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Returns tensors of the same norm: on a CPU, norms of many small tensors replace these.

    They are computed in float64. In the tensors' dtype, a sum of so many squares would be less
    precise than a sum of norms, and might overflow.
    """
    small: list[torch.Tensor] = []
    joined: list[torch.Tensor] = []
    for tensor in tensors:  # sparse ones, which torch refuses, have no `nbytes`
        (small if tensor.numel() * tensor.itemsize <= SMALL else joined).append(tensor)
    for start in range(0, len(small), _TOGETHER):
        some = small[start : start + _TOGETHER]
        flat = _C.copy_to_flat(some, some)
        if flat is None:
            joined += some
            continue
        dtype = torch.promote_types(flat.dtype, torch.float64)
        joined.append(torch.linalg.vector_norm(flat, norm_type, dtype=dtype).reshape(1))
    return joined


def _over_ranks(norms: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns norms over all ranks of ``group``, of which each has ``norms``. Collective.

    An all-reduce to the maximum would lose NaNs.
    """
    sent = norms
    if norms.device.type not in dist.get_backend_config(group):  # shards are offloaded
        sent = norms.to(torch_internals.device_of_objects(group))
    rows = sent.new_empty(group.size(), norms.numel())
    dist.all_gather(list(rows), sent, group)
    return torch.linalg.vector_norm(rows.to(norms.device), norm_type or 1.0, dim=0)
