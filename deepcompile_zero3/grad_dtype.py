"""The leaf dtype contract: the dtype that the gradient of each use is cast to.

In eager PyTorch the autograd engine casts the gradient of each use of a leaf to ``leaf.grad_dtype``
before it sums the uses. If ``leaf.grad_dtype`` is None, gradients keep the dtype they arrive in.
See ``Tensor.grad_dtype`` in
https://docs.pytorch.org/docs/stable/tensors.html.

The *leaf* here is the full tensor that a model computes with. The shard's ``.grad`` may have
another dtype: see ``GradientDtypes``.
"""

import torch

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C

# Dtypes that gradients can be kept and sent in.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def resolve(
    declared: torch.dtype | None,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
) -> _C.GradientDtypes:
    """Returns the dtypes of a parameter of ``dtype`` with ``grad_dtype=declared``.

    The forward of the parameter computes in ``compute_dtype``. Without a ``reduce_dtype``, ranks
    are summed in ``declared``, whatever the forward computes in. A ``grad_dtype`` equal to the
    parameter's own dtype cannot be told from the default. Parameters of integer and similar dtypes
    have no gradient: all attributes are None.
    """
    if compute_dtype not in DTYPES:
        return _C.GradientDtypes(leaf=None, wire=None, shard=None)
    wire = declared if reduce_dtype is None else reduce_dtype
    leaf = compute_dtype if declared == dtype else declared
    return _C.GradientDtypes(leaf=leaf, wire=wire, shard=declared)


def check(fqn: str, tensor: torch.Tensor) -> None:
    """Raises Zero3Error if gradients cannot be kept in the ``grad_dtype`` of ``tensor``."""
    declared = tensor.grad_dtype
    if declared not in (None, tensor.dtype, *DTYPES):
        raise Zero3Error(
            f"grad_dtype of '{fqn}' is {declared}; a gradient can be kept in "
            f"{', '.join(map(str, DTYPES))}, or as it arrives (None)"
        )


def carry_over(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies the ``grad_dtype`` of ``source``, which ``detach`` drops, to ``target``."""
    if torch_internals.has_grad_dtype(source):
        target.grad_dtype = source.grad_dtype


def declare(primal: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Declares ``dtype`` on the gradient edge of a traced primal.

    A traced graph calls this function before it uses the primal. The call leaves no node behind. It
    makes AOTAutograd's joint graph cast gradients as the eager engine would.
    """
    _C.declare_grad_dtype(primal, dtype)
