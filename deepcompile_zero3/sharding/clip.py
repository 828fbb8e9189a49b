"""``clip_grad_norm_``: clips gradients that lie on several meshes by the norm of all of them."""

import functools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

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
    each process group that gradients are sharded over, however many gradients there are.

    Args:
        parameters: parameters, or one of them. Those without a gradient are left out. Gradients may
            be DTensors over any meshes, and plain tensors, which must be the same on all ranks.
        max_norm: the norm that gradients are scaled down to.
        norm_type: the order of the norm, as in :func:`torch.linalg.vector_norm`; 0 counts the
            gradients that are not zero.
        error_if_nonfinite: whether a norm that is not finite raises, on all ranks, and leaves the
            gradients unscaled.
        foreach: as in torch.

    Returns:
        The norm before scaling: a plain tensor of no dimension, the same on all ranks.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` asks for an error.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm_type = float(norm_type)
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)

    total = _total_norm([p.grad for p in parameters if p.grad is not None], norm_type, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped by it: find the gradient with detect_nonfinite(model), or pass "
            "error_if_nonfinite=False"
        )
    for of_mesh in by_mesh.values():
        nn.utils.clip_grads_with_norm_(of_mesh, max_norm, total, foreach)
    return total


def _total_norm(
    gradients: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """Returns the norm of all ``gradients``, each of them whole. Collective."""
    if not gradients:
        return torch.tensor(0.0)
    device = gradients[0].device
    dtype = functools.reduce(torch.promote_types, (g.dtype for g in gradients))
    parts: dict[_Groups, list[torch.Tensor]] = {}
    for gradient in gradients:
        groups, local = _sharded_over(gradient)
        parts.setdefault(groups, []).append(local)
    norms = {
        groups: [_local_norms(part, norm_type, foreach).to(device, dtype)]
        for groups, part in parts.items()
    }
    # The norm of norms is the norm of all. The innermost groups come first: what these ranks have
    # together may be sharded over the same group as gradients of another mesh.
    while groups := max(norms, key=len):
        mine = torch.cat(norms.pop(groups))
        if norm_type != 0.0:
            mine = torch.linalg.vector_norm(mine, norm_type).reshape(1)
        norms.setdefault(groups[:-1], []).append(_over_ranks(mine, norm_type, groups[-1]))
    return torch.linalg.vector_norm(torch.cat(norms[()]), norm_type)


def _sharded_over(gradient: torch.Tensor) -> tuple[_Groups, torch.Tensor]:
    """Returns the process groups that ``gradient`` is sharded over, and this rank's shard."""
    if not isinstance(gradient, DTensor):
        return (), gradient
    mesh = gradient.device_mesh
    if any(placement.is_partial() for placement in gradient.placements):
        summed = [Replicate() if p.is_partial() else p for p in gradient.placements]
        gradient = gradient.redistribute(mesh, summed)
    groups = tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    )
    return groups, gradient.to_local()


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
