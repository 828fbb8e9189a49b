"""Comparison of the values of replicas, which have to be the same."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.module_parameters import by_mesh
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.transport.json_collectives import all_gather_json, all_gather_lines, shorten

_COMPARISON = "comparison of replicas"
_ODD = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, an odd int64: spreads hashes


def different_replicas(delivered: Iterable[ShardedParameter]) -> str:
    """Returns an error message if replicas of parameters differ, or "".

    Collective if ``delivered`` has parameters whose replicas were not compared. Compares all
    parameters that share a model and a mesh with one of these, until they are equal once: only here
    do all ranks of a mesh meet after a model has got its values.
    """
    uncompared = {parameter for parameter in delivered if not parameter.replicas_are_compared}
    meshes = {(parameter.model, parameter.layout.ranks.process_groups) for parameter in uncompared}
    uncompared.update(
        parameter
        for model, groups in meshes
        if model is not None
        for parameter in model.parameters
        if parameter.layout.ranks.process_groups == groups and not parameter.replicas_are_compared
    )
    told: list[str] = []
    for groups, members in by_mesh(uncompared).items():
        told = all_gather_lines(_COMPARISON, told + _differences(members, groups[-1]), groups)
        # Ranks of this mesh remember what all of them were told by now. Only some of them may be
        # told more, on the next mesh.
        for parameter in members:
            parameter.replicas_are_compared = not told
    if not told:
        return ""
    return (
        f"replicas have different values, and stay different: {shorten(told)}. Before training, "
        "give all replicas the same values: call torch.manual_seed with one seed on all ranks "
        "before the model is built or initialized, load one checkpoint, or broadcast the values of "
        "one replica. Name parameters that are meant to differ in ignored_params of fully_shard"
    )


def _differences(parameters: Sequence[ShardedParameter], replicas: dist.ProcessGroup) -> list[str]:
    """Returns which shards of ``parameters`` differ from the first replica's. Collective."""
    ranks = dist.get_process_group_ranks(replicas)
    mine = {parameter.fqn: _checksum_or_error(parameter) for parameter in parameters}
    of_ranks = all_gather_json(_COMPARISON, mine, replicas)
    found = []
    for fqn in mine:
        for rank, theirs in zip(ranks, of_ranks, strict=True):
            if isinstance(theirs.get(fqn), str):
                found.append(f"on rank {rank}, {theirs[fqn]}")
            elif theirs.get(fqn) != of_ranks[0].get(fqn):
                found.append(f"'{fqn}' on rank {rank} is not what it is on rank {ranks[0]}")
    return found


def _checksum_or_error(parameter: ShardedParameter) -> int | str | None:
    """Returns the checksum of the shard, or an error message: other ranks wait for either."""
    try:
        return _checksum(torch_internals.local_tensor(parameter.refresh()))
    except Zero3Error as error:
        return str(error)
    except Exception as error:
        return f"'{parameter.fqn}': {error}"


def _checksum(shard: torch.Tensor) -> int | None:
    """Returns a hash of the values of ``shard``, or None if it has none yet.

    A sum of bits alone would be the same for values that are negated or in another order.
    """
    if shard.is_meta:
        return None
    if torch_internals.is_wrapper(shard):
        wrapper: Any = shard
        names, _ = wrapper.__tensor_flatten__()
        parts = [_checksum(getattr(wrapper, name)) for name in names]
        return None if None in parts else hash(tuple(parts))
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    start = 0
    for piece in shard.detach().flatten().split(1 << 16):  # small enough for a processor's cache
        bits = _bits(piece)
        hashes = torch.arange(start, start + bits.numel(), device=shard.device)
        start += bits.numel()
        hashes.mul_(_ODD).add_(bits)
        hashes.bitwise_xor_(hashes >> 32).mul_(_ODD)
        total += hashes.bitwise_xor_(hashes >> 32).sum()
    return int(total)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Returns integers that are equal for equal ``values``, for both zeros and for all NaNs.

    For dtypes that gradients cannot have, the integers are the bytes.
    """
    if values.dtype not in grad_dtype.DTYPES:
        return values.view(torch.uint8)
    values = values.double() if values.element_size() == 8 else values.float()
    values = (values + 0.0).masked_fill_(values.isnan(), math.nan)
    return values.view(torch.int64 if values.element_size() == 8 else torch.int32)
