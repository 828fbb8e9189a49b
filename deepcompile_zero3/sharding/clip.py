"""``clip_grad_norm_``: clips gradients that lie on several meshes by the norm of all of them."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.placement_types import Placement

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.sharding.owned import OwnerMesh
from deepcompile_zero3.sharding.step_in_backward import check_has_gradients

# The process groups that a tensor is sharded over, in the order of its mesh's dimensions.
_Groups = tuple[dist.ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients in place, so that the norm of all of them is at most ``max_norm``.

    The signature, the scale and the result are those of :func:`torch.nn.utils.clip_grad_norm_`,
    which raises if parameters lie on several meshes. Collective: ranks exchange one number over
    each process group that parameters are sharded over, however many parameters there are. For
    order 0 they exchange one number for each parameter. All ranks of a mesh pass its parameters in
    one order. Ranks may differ in which of them have a gradient.

    Args:
        parameters: parameters, or one of them. Each is a DTensor over any mesh, or a plain tensor,
            whose gradient must be the same on all ranks. A gradient has the mesh of its parameter.
            A gradient that is missing on a rank counts as zero there, and is left out for negative
            orders, whose norm of no gradients is inf. Gradients that are partial sums are summed
            first: all ranks of a mesh have them, or none.
        max_norm: the norm that gradients are scaled down to.
        norm_type: the order of the norm, as in :func:`torch.linalg.vector_norm`; 0 counts the
            gradients that are not zero.
        error_if_nonfinite: whether a norm that is not finite raises, on all ranks, and leaves the
            gradients unscaled.
        foreach: as in torch.

    Returns:
        The norm before scaling: a plain tensor of no dimension, the same on all ranks, on the
        device of the first parameter. The dtypes of all gradients promote to its dtype, those that
        are missing included: parameters declare them in ``grad_dtype``, of which None counts as
        float32 or wider.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` asks for an error.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    groups_of: dict[Any, _Groups] = {}  # by mesh and placements
    parts = [
        _Part(parameter, dtype, groups_of)
        for parameter in parameters
        if (dtype := _declared_dtype(parameter)) is not None
    ]
    norm_type = float(norm_type)
    total = _total_norm(parts, norm_type, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped by it: find the gradient with detect_nonfinite(model), or pass "
            "error_if_nonfinite=False"
        )
    # torch reads no more of a parameter than its gradient.
    nn.utils.clip_grads_with_norm_(cast(Any, parts), max_norm, total, foreach)
    return total


class _Part:
    """This rank's part of a parameter, as torch clips it.

    Attributes:
        dtype: dtype of the gradient, whether or not there is one.
        device: the device that the parameter is on.
        groups: the process groups that the parameter is sharded over.
        grad: the local tensor of the gradient, or None.
        summed: the same after partial sums are summed.
    """

    __slots__ = ("device", "dtype", "grad", "groups", "summed")

    def __init__(
        self, parameter: torch.Tensor, dtype: torch.dtype, groups_of: dict[Any, _Groups]
    ) -> None:
        check_has_gradients(parameter)
        self.dtype = dtype
        self.device = parameter.device
        self.groups: _Groups = ()
        self.grad = self.summed = parameter.grad
        if not isinstance(parameter, DTensor):
            return
        spec = torch_internals.spec_of(parameter)
        key = id(spec.mesh), spec.placements
        if key not in groups_of:
            groups_of[key] = _groups_of(spec.mesh, spec.placements)
        self.groups = groups_of[key]
        if self.grad is not None:
            self.grad = torch_internals.local_tensor(cast(DTensor, self.grad))
            self.summed = torch_internals.local_gradient(parameter)


def _total_norm(parts: list[_Part], norm_type: float, foreach: bool | None) -> torch.Tensor:
    """Returns the norm of the gradients of all ``parts``, each of them full. Collective."""
    if not parts:
        return torch.tensor(0.0)
    # Everything that ranks have to agree on is read from parameters: any gradient may be missing.
    dtype = functools.reduce(torch.promote_types, {part.dtype for part in parts})
    gradients: dict[tuple[torch.device, _Groups], list[torch.Tensor]] = {}
    for part in parts:
        mine = part.summed
        if mine is None:
            mine = torch.empty(0, dtype=part.dtype, device=part.device)
        gradients.setdefault((part.device, part.groups), []).append(mine)
    norms = {
        (device, groups): [_local_norms(mine, norm_type, foreach).to(device, dtype)]
        for (device, groups), mine in gradients.items()
    }
    # The norm of norms is the norm of all. The innermost groups come first: what these ranks have
    # together may be sharded over the same group as gradients of another mesh.
    while (innermost := max(norms, key=lambda key: len(key[1])))[1]:
        device, groups = innermost
        mine = torch.cat(norms.pop(innermost))
        if norm_type != 0.0:
            mine = torch.linalg.vector_norm(mine, norm_type).reshape(1)
        joined = norms.setdefault((device, groups[:-1]), [])
        joined.append(_over_ranks(mine, norm_type, groups[-1]))
    device = parts[0].device
    wholes = [norm.to(device) for of_device in norms.values() for norm in of_device]
    return torch.linalg.vector_norm(torch.cat(wholes), norm_type)


def _declared_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype of the gradient of ``parameter``, whether or not it has one.

    Returns None if it can have none, as quantised weights.
    """
    dtype = parameter.grad_dtype if parameter.is_leaf else parameter.dtype
    if dtype is None:
        wide = parameter.dtype in (torch.float64, torch.complex128)
        return torch.float64 if wide else torch.float32
    dtype = dtype.to_real()
    return dtype if dtype in grad_dtype.DTYPES else None


def _groups_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> _Groups:
    """Returns the process groups that a DTensor is sharded over."""
    if isinstance(mesh, OwnerMesh):
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
    if norm_type == 0.0:  # counts the tensors that are not zero, which ranks may have parts of
        return torch.stack([torch.linalg.vector_norm(t, 0.0) for t in tensors])
    tensors_with_rows = [t for t in tensors if t.numel() > 0]  # others have no infinity norm
    if not tensors_with_rows:
        return tensors[0].new_full([1], math.inf if norm_type < 0 else 0.0)
    return nn.utils.get_total_norm(tensors_with_rows, norm_type, foreach=foreach).reshape(1)


def _over_ranks(norms: torch.Tensor, norm_type: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the norms of what all ranks of ``group`` have. Collective.

    An all-reduce to the maximum would lose NaNs.
    """
    rows = norms.new_empty(group.size(), norms.numel())
    dist.all_gather(list(rows), norms, group)
    return torch.linalg.vector_norm(rows, norm_type or 1.0, dim=0)
