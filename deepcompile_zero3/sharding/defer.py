"""Late gradients: weight gradients that are computed after the backward, outside of autograd.

Schedules such as zero bubble and DualPipe run a backward for the gradients of inputs first, and
those of weights when there is time. See https://arxiv.org/abs/2401.10241.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.module import all_parameters_of
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.transport import agree

# By id of the shard, which is kept alive here: the parameters whose reduction is deferred now.
_deferred: dict[int, tuple[torch.Tensor, ShardedParameter]] = {}


@contextlib.contextmanager
def defer_reduction(model: nn.Module) -> Iterator[None]:
    """Sums the gradients of ``model`` while the block runs, and reduces each sum once, at its end.

    Whatever comes is summed, in whatever order and dtype: backwards in eager code and in compiled
    graphs, and :func:`deposit_grad`. ``.grad`` and the hooks on it follow when the block ends. It
    costs the memory of the full gradients.

    At its end the ranks tell each other which parameters have got something; one that got nothing
    on some rank counts as zero there. A block that raises drops all that is not reduced yet, sums
    of micro-batches before it too, and must raise on every rank: others would wait. Parameters
    without gradient sync keep their sums.

    Args:
        model: whose parameters are sharded, or a part of such a model. All ranks enter it.

    Raises:
        Zero3Error: nothing in ``model`` is sharded, its reduction is deferred already, or, at the
            end, a backward in the block has raised.

    Example::

        with defer_reduction(model):
            loss.backward()
            deposit_grad(model.head.weight, late_grad)
    """
    parameters = all_parameters_of(model, "defer_reduction")
    if any(parameter.handle.deferred for parameter in parameters):
        raise Zero3Error("defer_reduction: the reduction of this model is deferred already")
    shards = {id(p.shard): (p.shard, p) for p in parameters}
    for parameter in parameters:
        parameter.settle_between_forwards()
    _deferred.update(shards)
    for parameter in parameters:
        parameter.handle.deferred = True
        parameter.handle.dropped = False
    try:
        try:
            yield
            dropped = [parameter.fqn for parameter in parameters if parameter.handle.dropped]
            if dropped:
                raise Zero3Error(
                    "defer_reduction: a backward in the block raised, and the gradients of "
                    f"{dropped[0]!r} and others that had come before it are lost"
                )
            _agree(parameters)
        finally:
            for parameter in parameters:
                parameter.handle.deferred = False
            for shard in shards:
                del _deferred[shard]
        _C.reduce_accumulated([parameter.handle for parameter in parameters])
    except BaseException:
        for parameter in parameters:
            parameter.handle.drop_accumulated()
        raise


def _agree(parameters: list[ShardedParameter]) -> None:
    """Lets every rank have a sum where one has, of a dtype that holds what came on any."""
    by_group: dict[str, list[ShardedParameter]] = {}
    for parameter in parameters:
        by_group.setdefault(parameter.handle.reduce_group_name, []).append(parameter)
    for parameter in parameters:  # then those that they have replicas with
        if parameter.handle.replicate_group_name:
            by_group.setdefault(parameter.handle.replicate_group_name, []).append(parameter)
    for group_name, members in by_group.items():
        mine = [_name_of(parameter.handle.arrived_dtype) for parameter in members]
        group = torch_internals.resolve_process_group(group_name)
        arrived = agree.gather("defer_reduction", mine, group)
        for parameter, names in zip(members, zip(*arrived, strict=True), strict=True):
            for name in sorted(set(names) - {None}):
                sizes, dtype = parameter.handle.sizes, getattr(torch, name)
                if dtype != parameter.handle.arrived_dtype:
                    zero = torch.zeros((), dtype=dtype, device=parameter.handle.device)
                    parameter.handle.accumulate(zero.expand(sizes))


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def deposit_grad(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Adds a full gradient of this rank to those that :func:`defer_reduction` sums.

    It is cast to the parameter's ``grad_dtype`` first, as one that autograd brings.

    Args:
        parameter: a DTensor of ``model.parameters()``.
        grad: as the parameter is in a forward, in any dtype: of its full shape, and plain unless
            the module's parameters were DTensors before ``fully_shard``. It is copied.

    Raises:
        Zero3Error: outside of ``defer_reduction``, the parameter needs no gradient or belongs to
            another model, or ``grad`` is a DTensor where the parameter is none, or none where it
            is.
        RuntimeError: ``grad`` has another shape or device than the full parameter, or a dtype
            other than float32, float64, bfloat16 and float16.
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
    found.handle.accumulate(found.layout.whole(grad))
