"""``clip_grad_norm_``: clips gradients that lie on several meshes by the norm of all of them."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from deepcompile_zero3 import grad_dtype
from deepcompile_zero3.sharding.gradients.norms import GradientPart, ProcessGroups, total_norm
from deepcompile_zero3.sharding.gradients.sink import refuse_if_taken


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
        The norm before scaling, a plain tensor of no dimension, the same on all ranks, on the
        device of the first parameter. Its dtype is the one that all gradients' dtypes promote to.
        A missing gradient counts too, by the parameter's ``grad_dtype``: None counts as float32 or
        wider.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` asks for an error.
        Zero3Error: a backward steps a parameter, see :func:`step_in_backward`.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    groups_of: dict[int, ProcessGroups] = {}  # of specs that `parameters` keep alive
    parts = []
    for parameter in parameters:
        refuse_if_taken(parameter, "clip_grad_norm_")
        if (dtype := _declared_dtype(parameter)) is not None:
            parts.append(GradientPart(parameter, dtype, groups_of))
    norm_type = float(norm_type)
    total = total_norm(parts, norm_type, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped by it: find the gradient with detect_nonfinite(model), or pass "
            "error_if_nonfinite=False"
        )
    # torch reads no more of a parameter than its gradient.
    nn.utils.clip_grads_with_norm_(cast(Any, parts), max_norm, total, foreach)
    return total


def _declared_dtype(parameter: torch.Tensor) -> torch.dtype | None:
    """Returns the dtype of the gradient of ``parameter``, whether or not it has one.

    Returns None for parameters that cannot have a gradient, such as quantized weights.
    """
    dtype = parameter.grad_dtype if parameter.is_leaf else parameter.dtype
    if dtype is None:
        wide = parameter.dtype in (torch.float64, torch.complex128)
        return torch.float64 if wide else torch.float32
    dtype = dtype.to_real()
    return dtype if dtype in grad_dtype.DTYPES else None
