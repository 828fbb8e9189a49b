"""Late gradients: weight gradients that are computed after the backward, outside of autograd.

Schedules such as zero bubble and DualPipe run a backward for the gradients of inputs first, and
those of weights when there is time. See https://arxiv.org/abs/2401.10241.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.module import Zero3Module
from deepcompile_zero3.parameter import ShardedParameter
from deepcompile_zero3.runtime import _C, ops

# By id of the shard: the parameters of the models whose reduction is deferred now.
_deferred: dict[int, ShardedParameter] = {}


@contextlib.contextmanager
def defer_reduction(model: nn.Module) -> Iterator[None]:
    """Sums the gradients of ``model`` while the block runs, and reduces each sum once, at its end.

    Whatever comes is summed, in whatever order and dtype: backwards in eager code and in compiled
    graphs, :func:`deposit_grad`, and ``torch.ops.zero3.reduce_grad(grad, fqn)``. ``.grad`` and the
    hooks on it follow when the block ends. It costs the memory of the full gradients. A block that
    raises drops them. Parameters without gradient sync keep their sums, as they do anyway.

    Args:
        model: sharded, or with sharded modules in it. Every rank must use it alike.

    Raises:
        Zero3Error: nothing in ``model`` is sharded, or its reduction is deferred already.

    Example::

        with defer_reduction(model):
            loss.backward()
            deposit_grad(model.head.weight, late_grad)
    """
    parameters = [
        parameter
        for module in model.modules()
        if isinstance(module, Zero3Module)
        for parameter in module._zero3_group.parameters
    ]
    if not parameters:
        raise Zero3Error(f"defer_reduction: no module of the {type(model).__name__} is sharded")
    if any(parameter.handle.deferred for parameter in parameters):
        raise Zero3Error("defer_reduction: the reduction of this model is deferred already")
    shards = {id(parameter.shard): parameter for parameter in parameters}
    _deferred.update(shards)
    for parameter in parameters:
        parameter.handle.deferred = True
    try:
        yield
    except BaseException:
        for parameter in parameters:
            parameter.handle.drop_accumulated()
        raise
    finally:
        for parameter in parameters:
            parameter.handle.deferred = False
        for shard in shards:
            del _deferred[shard]
    _C.reduce_accumulated([parameter.handle for parameter in parameters])


def deposit_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds a full gradient of this rank to those that :func:`defer_reduction` sums.

    It is cast to the parameter's ``grad_dtype`` first, as one that autograd brings.

    Args:
        parameter: a DTensor of ``model.parameters()``.
        grad: a plain tensor of the parameter's full shape, of any floating dtype. It is copied.

    Raises:
        Zero3Error: outside of ``defer_reduction``, or the parameter needs no gradient.
        RuntimeError: ``grad`` has another shape or device than the full parameter.
    """
    found = _deferred.get(id(parameter))
    if found is None:
        raise Zero3Error(
            "deposit_grad takes a parameter of a model whose reduction is deferred: call it inside "
            "of `with defer_reduction(model):`, with a parameter of model.parameters()"
        )
    if not parameter.requires_grad:
        raise Zero3Error(f"'{found.fqn}' needs no gradient, but one was deposited for it")
    if isinstance(grad, DTensor):
        raise Zero3Error(
            f"the deposited gradient of '{found.fqn}' is a DTensor: pass a full tensor"
        )
    found.refresh()
    ops.reduce_grad.default(grad, found.fqn)
