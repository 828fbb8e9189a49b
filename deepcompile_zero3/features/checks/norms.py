"""``gradient_norms``: the norm of each parameter's gradient."""

from torch import nn

from deepcompile_zero3.sharding.gradients.norms import gradient_norm
from deepcompile_zero3.sharding.module_parameters import all_parameters_of


def gradient_norms(model: nn.Module, norm_type: float = 2.0) -> dict[str, float]:
    """Returns the norm of each parameter's full gradient, keyed by name. Collective.

    Parameters without a gradient are left out. Each norm takes an exchange of one number: call this
    for an occasional look.

    Args:
        model: a sharded model. For parameters that are not sharded, the gradient of this rank is
            used.
        norm_type: the order of the norm, as in :func:`torch.linalg.vector_norm`.

    Raises:
        Zero3Error: nothing in ``model`` is sharded.
        TypeError: ``model`` is not a module.
    """
    all_parameters_of(model, "gradient_norms")
    norms = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            norms[name] = gradient_norm(parameter, float(norm_type)).item()
    return norms
