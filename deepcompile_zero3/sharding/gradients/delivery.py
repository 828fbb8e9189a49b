"""Callbacks of the runtime that deliver gradients to ``.grad`` and prepare an unshard."""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.forward.all_gather import republish_if_recomputing
from deepcompile_zero3.sharding.gradients.sink import Check, Sink
from deepcompile_zero3.sharding.group import ParameterGroup, group_of, group_or_none
from deepcompile_zero3.sharding.model import models_numbered
from deepcompile_zero3.sharding.parameter import ShardedParameter, parameter_of
from deepcompile_zero3.sharding.source import source_of


@torch_internals.disable_dynamo
def _deliver(
    gradients: Sequence[tuple[_C.Parameter, torch.Tensor]],
    moment: _C.Moment,
    model_numbers: Sequence[int],
) -> None:
    """Adds reduced gradients to ``.grad``.

    The runtime calls this at the end of a backward or of ``reduce_deferred``, and earlier for
    parameters whose sink takes them early.
    """
    # A parameter that is missing was deleted during its own backward.
    arrived = [(parameter_of(handle.placeholder), reduced) for handle, reduced in gradients]
    sums: dict[ShardedParameter, torch.Tensor] = {}  # gradients of several forwards are added
    for parameter, reduced in arrived:
        if parameter is not None:
            sums[parameter] = sums[parameter] + reduced if parameter in sums else reduced
    delivered = list(sums.items())
    if moment != _C.Moment.EARLY:
        # Hooks may communicate, and gradients arrive in other orders on ranks that differ.
        delivered.sort(key=lambda each: (each[0].handle.model_number, each[0].position))
        _check(delivered)
        _run_all_reduce_hooks(delivered)
    taken = [
        (parameter, shard, reduced)
        for parameter, reduced in delivered
        if _is_taken(parameter, shard := parameter.unchanged_shard())
    ]
    for parameter, shard, _ in taken:
        parameter.registered.check_gradient(shard)
    for parameter, shard, reduced in taken:
        parameter.registered.accumulate_grad(shard, reduced)
    for shard in dict.fromkeys(shard for _, shard, _ in taken):
        for hook in torch_internals.post_accumulate_grad_hooks(shard):
            hook(shard)
    _let_sinks_take([parameter for parameter, _ in delivered], moment, model_numbers)


def _is_taken(parameter: ShardedParameter, shard: DTensor) -> bool:
    """Returns whether a gradient that has arrived belongs in ``.grad``.

    As in torch, it does not if the parameter was frozen after its forward. Of one that was frozen
    ahead of its forward, what arrives is the sum of earlier backwards, perhaps of other ranks.
    """
    return shard.requires_grad or not parameter.placeholder.requires_grad


def _check(reduced: Sequence[tuple[ShardedParameter, torch.Tensor]]) -> None:
    """Raises Zero3Error if a check of the gradients finds an error.

    All checks run before it raises, since they are collective: where meshes cross, only some ranks
    may find an error.
    """
    checked: dict[tuple[str, Check], list[tuple[ShardedParameter, torch.Tensor]]] = {}
    for parameter, gradient in reduced:
        for each in parameter.checks.items():
            checked.setdefault(each, []).append((parameter, gradient))
    by_name = sorted(checked.items(), key=lambda item: item[0][0])
    errors = [check(gradients) for (_, check), gradients in by_name]
    for error in filter(None, errors):
        raise Zero3Error(error)


def _let_sinks_take(
    delivered: Sequence[ShardedParameter], moment: _C.Moment, model_numbers: Sequence[int]
) -> None:
    """Lets sinks take the gradients that were delivered, if this is the last backward of a step.

    At the end of the backward, sinks also take gradients that earlier backwards have left.

    Args:
        delivered: parameters whose gradients were delivered now.
        moment: the moment of the backward.
        model_numbers: at the end, the models that got gradients in this backward, early ones
            included.
    """
    if moment == _C.Moment.NESTED_END:  # the backward around it may bring more
        return
    parameters = dict.fromkeys(delivered)
    if moment == _C.Moment.END:
        for each in models_numbered(model_numbers):
            each.gather_orders.end_backward()
            each.forwards.clear()
            parameters.update(dict.fromkeys(each.parameters))
    by_sink: dict[Sink, list[ShardedParameter]] = {}
    for parameter in parameters:
        if parameter.sink is None or (model := parameter.model) is None:
            continue
        its_parameters = by_sink.setdefault(parameter.sink, [])
        if model.is_last_backward:
            parameter.deliver_early_if_possible()
            if parameter.shard.grad is not None:
                its_parameters.append(parameter)
    for sink, its_parameters in by_sink.items():
        if its_parameters:
            sink.take(its_parameters)
    if moment == _C.Moment.END:
        for sink in by_sink:
            sink.finish(model_numbers)


def _interrupted(model_numbers: Sequence[int]) -> None:
    """Tells sinks that a backward has raised. The runtime calls it."""
    models = models_numbered(model_numbers)
    sinks = dict.fromkeys(parameter.sink for model in models for parameter in model.parameters)
    for sink in filter(None, sinks):
        sink.interrupt(model_numbers)


def _run_all_reduce_hooks(reduced: Sequence[tuple[ShardedParameter, torch.Tensor]]) -> None:
    """Lets the hooks of groups change the gradients that were reduced.

    Hooks may communicate: all ranks call them in one order, with parameters in one order.
    """
    by_hook: dict[tuple[ParameterGroup, torch.dtype], list[torch.Tensor]] = {}
    for parameter, gradient in reduced:
        group = group_or_none(parameter)
        if group is not None and group.all_reduce_hook is not None:
            by_hook.setdefault((group, gradient.dtype), []).append(gradient)
    for (group, _), gradients in by_hook.items():
        hook = cast(Callable[[torch.Tensor], None], group.all_reduce_hook)
        with torch.no_grad():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            hook(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


@torch_internals.disable_dynamo
def _prepare_unshard(placeholder: torch.Tensor) -> None:
    """Prepares a ``zero3::unshard`` that runs without a read of the module's property.

    Follows the shard and, in a forward, records the settings of the parameter's group. The runtime
    calls it.
    """
    source = source_of(placeholder)
    if source is None:
        return
    parameter = source.parameter
    if parameter.substitute is not None and source is not parameter:
        parameter.refresh()
        parameter.substitute.prepare_op(source, parameter.registered.local)
    if _C.in_backward():
        parameter.refresh()
        republish_if_recomputing([parameter])
        return
    changed = [p.fqn for p in group_of(parameter).parameters if not p.prepare_forward()]
    if changed:
        raise Zero3Error(
            f"requires_grad or grad_dtype of {', '.join(map(repr, changed))} changed since this "
            "graph was compiled; run the model again: it compiles anew"
        )


@functools.cache  # once: a backward on another thread may be calling them
def connect_runtime() -> None:
    """Makes the runtime call the functions of this file."""
    _C.set_deliver(_deliver)
    _C.set_interrupted(_interrupted)
    _C.set_prepare_unshard(_prepare_unshard)
