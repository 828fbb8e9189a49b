"""Looking at gradients: which are not finite and where they came from, and their norms."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3.sharding.module import all_parameters_of


@contextlib.contextmanager
def detect_nonfinite(model: nn.Module) -> Iterator[None]:
    """Backwards in the block raise if a gradient of ``model`` has a NaN or an infinity.

    Each gradient is looked at when it arrives, before it is cast to its ``grad_dtype``, and again
    when it is reduced, and the ranks tell each other what they found: all raise, and say on which
    rank which parameter's gradient was not finite first, or that only its sum is not. The
    gradients of that backward are dropped. It costs a pass over the gradients and an exchange.

    Args:
        model: whose parameters are sharded, or a part of such a model. All ranks enter it.

    Raises:
        Zero3Error: nothing in ``model`` is sharded; and backwards in the block, as above.
    """
    parameters = all_parameters_of(model, "detect_nonfinite")
    before = [parameter.handle.detects_nonfinite for parameter in parameters]
    for parameter in parameters:
        parameter.handle.detects_nonfinite = True
    try:
        yield
    finally:
        for parameter, detected in zip(parameters, before, strict=True):
            parameter.handle.detects_nonfinite = detected
            if not detected:
                parameter.handle.take_nonfinite()


def gradient_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, float]:
    """The norm of each parameter's whole gradient, by name; those without one are left out.

    Each takes an exchange of one number: for a look now and then. Collective.

    Args:
        model: a sharded model. Parameters that are not sharded are taken as they are on this rank.
        norm_type: the order of the norm, as in :func:`torch.linalg.vector_norm`.

    Raises:
        Zero3Error: nothing in ``model`` is sharded.
        TypeError: ``model`` is no module.
    """
    all_parameters_of(model, "gradient_norms")
    norms = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.detach()
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        norm = torch.linalg.vector_norm(gradient, norm_type)
        norms[name] = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    return norms
