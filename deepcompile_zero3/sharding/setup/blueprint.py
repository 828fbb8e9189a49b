"""A parameter that ``fully_shard`` is about to shard, as the call's arguments describe it."""

import dataclasses
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3.sharding.layouts.layout import DataParallelRanks, Layout
from deepcompile_zero3.sharding.source import kind_of


class Blueprint(NamedTuple):
    """A parameter that is to be sharded.

    Attributes:
        parameter: the parameter as the user built it.
        module: the first module that registers it.
        attribute: its name there.
        layout: its layout over the ranks.
        mp_policy: the policy with the parameter's own ``param_dtype``.
        full: the tensor [rows, ...] that is computed with, on meta.
        reshard_after_forward: see :class:`ShardedParameter`.
        described: a description that is the same on all ranks.
    """

    parameter: nn.Parameter
    module: nn.Module
    attribute: str
    layout: Layout
    mp_policy: MixedPrecisionPolicy
    full: torch.Tensor
    reshard_after_forward: bool | None
    described: str


def blueprint_of(
    place: tuple[str, nn.Module, str],
    parameter: nn.Parameter,
    layout: Layout,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int | None,
) -> Blueprint:
    """Returns the blueprint of a parameter, from the arguments of ``fully_shard``.

    ``place`` is its name, the first module that registers it, and its name there.

    Raises:
        ValueError: ``mp_policy`` or ``reshard_after_forward`` does not fit the parameter.
        NotImplementedError: the parameter's kind cannot be computed with in ``param_dtype``.
    """
    fqn, module, attribute = place
    policy = _policy_for(fqn, parameter, mp_policy)
    full = layout.full_like(parameter, policy.param_dtype)
    reshard, _ = resolve_reshard(reshard_after_forward, layout.ranks)
    described = (
        f"'{fqn}'; shape={list(full.shape)}; dtype={full.dtype}; strides={list(full.stride())}; "
        f"requires_grad={parameter.requires_grad}; grad_dtype={parameter.grad_dtype}; "
        f"reduce_dtype={policy.reduce_dtype}; placements={layout.placements}; {layout.described}; "
        f"reshard_after_forward={reshard_after_forward}"
    )
    if (kind := kind_of(parameter)) is not None:
        of_kind = kind.described(fqn, parameter, policy.param_dtype)
        described += f"; {of_kind}" if of_kind else ""
    return Blueprint(parameter, module, attribute, layout, policy, full, reshard, described)


def _policy_for(
    fqn: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy
) -> MixedPrecisionPolicy:
    """Returns ``policy`` with the ``param_dtype`` of ``parameter``.

    From torch 2.15 on, a policy may have a ``param_dtype_override_fn``.
    """
    override = getattr(policy, "param_dtype_override_fn", None)
    dtype = None if override is None else override(parameter)
    if dtype is None:
        return policy
    if dtype not in (policy.param_dtype, parameter.dtype):
        raise ValueError(
            f"param_dtype_override_fn of mp_policy gave {dtype!r} for '{fqn}'; it gives None, the "
            f"policy's param_dtype, {policy.param_dtype}, or the parameter's own, {parameter.dtype}"
        )
    return dataclasses.replace(policy, param_dtype=dtype)


def resolve_reshard(
    reshard_after_forward: bool | int | None, ranks: DataParallelRanks
) -> tuple[bool | None, int | None]:
    """Returns whether forwards reshard, and over how many ranks; None if over all or none."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, None
    world_size = ranks.shard_group.size()
    if not isinstance(reshard_after_forward, int) or (
        reshard_after_forward < 1 or world_size % reshard_after_forward
    ):
        raise ValueError(
            "reshard_after_forward is True, False, None or a divisor of the number of ranks that "
            f"have shards, {world_size}; got {reshard_after_forward!r}"
        )
    if reshard_after_forward in (1, world_size):
        return reshard_after_forward > 1, None
    return True, reshard_after_forward
