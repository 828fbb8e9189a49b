"""Conversions of a sharded module: ``module.to(dtype)``, ``load_state_dict(assign=True)``.

Until the first forward, parameters may take another dtype. The runtime's parameters are then built
again. A ``grad_dtype`` that was set stays.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.group import ParameterGroup, group_of
from deepcompile_zero3.sharding.module_parameters import parameters_of, registered_in
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.transport.connection import Connection
from deepcompile_zero3.transport.json_collectives import check_all_alike


def convert(
    group: ParameterGroup, reached: Sequence[ShardedParameter], apply: Callable[[], Any]
) -> Any:
    """Returns ``apply()``, which converts the module of ``group`` in place. Collective.

    ``reached`` are the parameters registered in the module and below it, of other groups too.
    """
    kept: list[tuple[DTensor, torch.dtype | None, torch.Tensor | None]] = []
    for parameter in reached:
        shard = parameter.shard
        if torch_internals.has_grad_dtype(shard):
            # torch would convert a gradient with the parameter, away from this dtype.
            kept.append((shard, shard.grad_dtype, shard.grad))
            shard.grad = None
    try:
        result = apply()
    finally:
        for shard, grad_dtype, grad in kept:
            shard.grad_dtype = grad_dtype
            shard.grad = None if grad is None else grad.to(shard.device)
    _rebuild_converted(group)
    return result


def before_load(module: nn.Module, *_: object) -> None:
    """Frees tensors that were gathered: ``load_state_dict`` changes the shards."""
    for group in _groups_of(module):
        group.reshard()


def before_state_dict(module: nn.Module, *_: object) -> None:
    """Frees tensors that ``unshard()`` gathered: a checkpoint may be loaded into a state dict."""
    for group in _groups_of(module):
        if group.is_unsharded_by_user:
            group.reshard()


def _groups_of(module: nn.Module) -> Iterable[ParameterGroup]:
    """Returns the groups of the parameters that a module registers."""
    return dict.fromkeys(map(group_of, parameters_of(module).values()))


def after_load(module: nn.Module, incompatible_keys: object) -> None:
    """Takes over the shards that ``load_state_dict(assign=True)`` has registered. Collective."""
    group: ParameterGroup = module._zero3_group  # type: ignore[assignment]
    # A tied parameter that another group gathers may have been loaded here too, and later.
    loaded = dict.fromkeys((*group.parameters, *registered_in(module)))
    for parameter in loaded:
        parameter.registered.tie_again()
    _rebuild_converted(group)
    follow_registered_shards(loaded)


def follow_registered_shards(parameters: Iterable[ShardedParameter]) -> None:
    """Makes ``parameters`` use the shards that are registered now, where possible."""
    for parameter in parameters:
        with contextlib.suppress(Zero3Error):  # the next forward raises it
            parameter.refresh()


def _rebuild_converted(group: ParameterGroup) -> None:
    """Rebuilds the parameters of ``group`` that have another dtype now: all of them, or none.

    Collective.
    """
    if group.model is not None and any(p.has_run for p in group.model.parameters):
        return  # the next forward refuses the dtype, on all ranks
    converted = [(p, full) for p in group.parameters if (full := _full_of_converted(p)) is not None]
    if not converted:
        return
    group.reshard()
    connected: list[tuple[ShardedParameter, torch.Tensor, Connection]] = []
    for ranks, connect in group.connects.items():
        members = [(p, full) for p, full in converted if p.layout.ranks is ranks]
        if not members:
            continue
        described = [
            f"'{p.fqn}'; converted from {p.registered.dtype} to {p.shard.dtype}" for p, _ in members
        ]
        for process_group in ranks.process_groups:
            check_all_alike(
                "conversion of a sharded module",
                described,
                process_group,
                remedy="convert the module to one dtype on all ranks",
            )
        layouts = [p.handle.layout for p, _ in members]
        connections = connect([full for _, full in members], layouts)
        for (parameter, full), connection in zip(members, connections, strict=True):
            connected.append((parameter, full, connection))
    for parameter, full, connection in connected:
        parameter.rebuild(full, connection)
    if group.model is not None:
        group.model.update()


def _full_of_converted(parameter: ShardedParameter) -> torch.Tensor | None:
    """Returns a meta tensor like the placeholder, in the dtype that a converted shard computes in.

    Returns None unless the shard was converted to another dtype before its first forward.
    """
    converted = None if parameter.has_run else parameter.registered.converted_dtype
    if converted is None:
        return None
    dtype, like = parameter.mp_policy.param_dtype or converted, parameter.placeholder
    return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")
