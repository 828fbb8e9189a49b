"""Late gradients: weight gradients that are computed after the backward, outside of autograd.

Schedules such as zero bubble and DualPipe first run a backward for the gradients of inputs. They
compute the gradients of weights when there is time. See https://arxiv.org/abs/2401.10241.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.module_parameters import all_parameters_of
from deepcompile_zero3.sharding.parameter import ShardedParameter

# Parameters whose reduction is deferred now, by id of the shard, which is kept alive here.
_deferred: dict[int, tuple[torch.Tensor, ShardedParameter]] = {}


@contextlib.contextmanager
def defer_reduction(model: nn.Module) -> Iterator[None]:
    """Sums the gradients of ``model`` while the block runs, and reduces each sum once, at its end.

    Gradients are summed in whatever order and dtype they arrive: from backwards in eager code and
    in compiled graphs, and from :func:`deposit_grad`. ``.grad`` and the hooks on it follow when the
    block ends. The block costs memory for the full gradients.

    At the end of the block the ranks exchange which parameters have a gradient, as at the beginning
    of a backward. A parameter without a gradient on some rank counts as zero there, unless
    ``set_requires_gradient_on_all_ranks(True)`` makes that an error. A block that raises drops all
    gradients that are not reduced yet, including sums of earlier micro-batches. It must raise on
    every rank, or the others wait. Parameters without gradient sync keep their sums.

    Args:
        model: a module whose parameters are sharded, or a part of such a model. All ranks enter the
            block.

    Raises:
        Zero3Error: nothing in ``model`` is sharded, or its reduction is deferred already. At the
            end of the block: a backward in it has raised, or ranks disagree on what is reduced.
        TypeError: ``model`` is not a module.

    Example::

        with defer_reduction(model):
            loss.backward()
            deposit_grad(model.head.weight, late_grad)
    """
    parameters = all_parameters_of(model, "defer_reduction")
    if any(parameter.settings.deferred for parameter in parameters):
        raise Zero3Error("defer_reduction: the reduction of this model is deferred already")
    shards = {id(p.shard): (p.shard, p) for p in parameters}
    for parameter in parameters:
        parameter.prepare_reduction()
    _deferred.update(shards)
    for parameter in parameters:
        parameter.settings = parameter.settings.replace(deferred=True)
        parameter.handle.take_dropped()
    try:
        try:
            yield
        finally:
            for shard in shards:
                del _deferred[shard]
    except BaseException:
        drop_deferred(parameters)
        raise
    reduce_deferred(parameters, "defer_reduction: a backward in the block")


def deposit_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds a full gradient of this rank to those that :func:`defer_reduction` sums.

    The gradient is cast to the parameter's ``grad_dtype`` first, as autograd casts it.

    Args:
        parameter: a DTensor of ``model.parameters()``.
        grad: a gradient with the full shape that the parameter has in a forward, of dtype float32,
            float64, bfloat16 or float16. It is a plain tensor unless the module's parameters were
            DTensors before ``fully_shard``. It is copied.

    Raises:
        Zero3Error: the call is outside of ``defer_reduction``, the parameter needs no gradient or
            belongs to another model, or only one of ``grad`` and the parameter in a forward is a
            DTensor.
        RuntimeError: ``grad`` has another shape or device than the full parameter, or another dtype
            than those above.
    """
    if not _deferred:
        raise Zero3Error("deposit_grad works inside of a `with defer_reduction(model):` block")
    _, found = _deferred.get(id(parameter), (None, None))
    if found is None:
        if isinstance(parameter, DTensor):
            raise Zero3Error(
                f"deposit_grad: the parameter {list(parameter.shape)} belongs to no model whose "
                "reduction is deferred in this block"
            )
        raise Zero3Error(
            "deposit_grad takes a DTensor of model.parameters(), got a "
            f"{type(parameter).__name__}. Inside of a forward a module's attribute is the gathered "
            "tensor, not the parameter"
        )
    if not parameter.requires_grad:
        raise Zero3Error(f"'{found.fqn}' needs no gradient, but one was deposited for it")
    inner = found.layout.inner
    if not isinstance(grad, torch.Tensor) or isinstance(grad, DTensor) != (inner is not None):
        raise Zero3Error(
            f"the gradient of '{found.fqn}' is a {type(grad).__name__}: deposit a full "
            + ("plain tensor" if inner is None else f"DTensor over {inner.mesh}")
        )
    found.handle.deposit(found.layout.full(grad))


def reduce_deferred(parameters: Sequence[ShardedParameter], what: str) -> None:
    """Reduces sums of parameters whose ``settings.deferred`` is set, which it clears. Collective.

    If that fails, all their gradients that are not reduced yet are dropped.

    Raises:
        Zero3Error: a backward has raised since ``handle.take_dropped()``, or ranks disagree on what
            is reduced. ``what`` names that backward.
    """
    try:
        dropped = [p.fqn for p in parameters if p.handle.take_dropped()]
        if dropped:
            raise Zero3Error(
                f"{what} raised, and the gradients of the model of {dropped[0]!r} that had come "
                "before are lost: compute the step again, on all ranks"
            )
        for parameter in parameters:
            parameter.prepare_reduction()  # frozen or thawed meanwhile
            parameter.settings = parameter.settings.replace(deferred=False)
        _C.reduce_deferred([parameter.handle for parameter in parameters])
    except BaseException:
        drop_deferred(parameters)
        raise


def drop_deferred(parameters: Iterable[ShardedParameter]) -> None:
    """Drops the gradients that ``reduce_deferred`` would reduce."""
    for parameter in parameters:
        parameter.settings = parameter.settings.replace(deferred=False)
        parameter.handle.drop_gradients()
