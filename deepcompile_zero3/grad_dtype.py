"""The leaf dtype contract: which dtype a gradient has when it reaches its parameter.

In eager PyTorch the autograd engine casts what reaches a leaf to ``leaf.grad_dtype``, each use
before uses are summed, or keeps what arrives when that is None. See ``Tensor.grad_dtype`` in
https://docs.pytorch.org/docs/stable/tensors.html.
"""

from dataclasses import dataclass

import torch

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C

# What gradients can be kept in, and sent in.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class GradDtype:
    """The contract of one parameter.

    Attributes:
        leaf: gradients are cast to it on arrival; None keeps whatever arrives.
        shard: dtype of the sharded ``.grad``; None is whatever was on the wire.
    """

    leaf: torch.dtype | None
    shard: torch.dtype | None


def resolve(
    declared: torch.dtype | None, dtype: torch.dtype, compute_dtype: torch.dtype
) -> GradDtype:
    """The contract of a parameter of ``dtype`` with ``grad_dtype=declared``, whose forward computes
    in ``compute_dtype``.

    A ``grad_dtype`` equal to the parameter's own dtype cannot be told from the default. Integers
    and the like have no gradient, and None.
    """
    if compute_dtype not in DTYPES:
        return GradDtype(leaf=None, shard=None)
    if declared == dtype:
        return GradDtype(leaf=compute_dtype, shard=dtype)
    return GradDtype(leaf=declared, shard=declared)


def check(fqn: str, tensor: torch.Tensor) -> None:
    """Raises if ``tensor`` declares a ``grad_dtype`` that gradients cannot be kept in."""
    declared = tensor.grad_dtype
    if declared not in (None, tensor.dtype, *DTYPES):
        raise Zero3Error(
            f"grad_dtype of '{fqn}' is {declared}; a gradient can be kept in "
            f"{', '.join(map(str, DTYPES))}, or as it arrives (None)"
        )


def carry_over(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives ``target`` the ``grad_dtype`` of ``source``, which ``detach`` drops."""
    if source.grad_dtype != source.dtype:
        target.grad_dtype = source.grad_dtype


def declare(primal: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Declares ``dtype`` on the gradient edge of a traced primal.

    Called from a traced graph before the primal is used. It leaves no node behind, and makes
    AOTAutograd's joint graph cast as the eager engine would.
    """
    _C.declare_grad_dtype(primal, dtype)
