"""What the runtime calls: when it has reduced gradients, and before it gathers."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.all_gather import publish_again_if_recomputing
from deepcompile_zero3.sharding.group import ParameterGroup, group_of
from deepcompile_zero3.sharding.parameter import ShardedParameter, parameter_of
from deepcompile_zero3.transport.json_collectives import all_gather_json

_COMPARISON = "comparison of replicas"
_REDUCED = "once it was reduced"
_ODD = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, an odd int64: spreads hashes

# The process groups of a mesh: see DataParallel.process_groups.
_Groups = tuple[dist.ProcessGroup, ...]


@torch_internals.disable_dynamo
def _deliver(gradients: Sequence[tuple[_C.Parameter, torch.Tensor]]) -> None:
    """Adds the reduced gradients of a backward to ``.grad``. The runtime calls this at its end."""
    # A parameter that is missing was deleted during its own backward.
    arrived = [(parameter_of(handle.placeholder), reduced) for handle, reduced in gradients]
    delivered = [(parameter, reduced) for parameter, reduced in arrived if parameter is not None]
    # Both are collective. Where meshes cross, one rank may find an error that another does not.
    errors = _nonfinite_gradients(delivered), _different_replicas(p for p, _ in delivered)
    if error := errors[0] or errors[1]:
        raise Zero3Error(error)
    for parameter, _ in delivered:
        parameter.check_unchanged()
    _run_all_reduce_hooks(delivered)
    for parameter, reduced in delivered:
        parameter.leaf.accumulate_grad(reduced)
    for parameter in dict.fromkeys(parameter for parameter, _ in delivered):
        shard = parameter.shard
        for hook in torch_internals.post_accumulate_grad_hooks(shard):
            hook(shard)


def _run_all_reduce_hooks(reduced: Sequence[tuple[ShardedParameter, torch.Tensor]]) -> None:
    """Lets the hooks of groups change the gradients that were reduced.

    Hooks may communicate: all ranks call them in one order, with parameters in one order.
    """
    hooked = [
        (parameter.position, group, shard)
        for parameter, shard in reduced
        if isinstance(group := parameter.group and parameter.group(), ParameterGroup)
        and group.all_reduce_hook is not None
    ]
    by_hook: dict[tuple[ParameterGroup, torch.dtype], list[torch.Tensor]] = {}
    # Gradients arrive in other orders on ranks that compute them differently.
    for _, group, shard in sorted(hooked, key=lambda each: each[0]):
        by_hook.setdefault((group, shard.dtype), []).append(shard)
    for (group, _), shards in by_hook.items():
        hook = cast(Callable[[torch.Tensor], None], group.all_reduce_hook)
        with torch.no_grad():
            flat = torch.cat([shard.reshape(-1) for shard in shards])
            hook(flat)
            for shard, part in zip(shards, flat.split([s.numel() for s in shards]), strict=True):
                shard.copy_(part.view_as(shard))


def _nonfinite_gradients(reduced: Sequence[tuple[ShardedParameter, torch.Tensor]]) -> str:
    """Returns an error message if a gradient that was reduced is not finite on some rank, or "".

    Collective if ``reduced`` has gradients of parameters that detect this.
    """
    found: dict[ShardedParameter, list[str]] = {}
    for parameter, shard in reduced:
        if not parameter.settings.detects_nonfinite:
            continue
        mine = found.setdefault(parameter, [])
        what = f"rank {dist.get_rank()}: that of '{parameter.fqn}'"
        if nonfinite := parameter.handle.take_nonfinite():
            mine.append(_described(f"{what}, before it was reduced,", *nonfinite))
        elif not torch.isfinite(shard).all():
            nans, infinities = int(shard.isnan().sum()), int(shard.isinf().sum())
            mine.append(_described(f"{what}, {_REDUCED},", nans, infinities, shard.numel()))
    told: list[str] = []
    for groups, members in _by_mesh(found).items():
        lines = [each for parameter in members for each in found[parameter]]
        told = _all_gather_lines("detect_nonfinite", told + lines, groups)
    # A reduced gradient is not finite because one that arrived was not: causes come first.
    first = sorted(told, key=lambda each: _REDUCED in each)
    return f"gradients are not finite. {_shortened(first)}" if told else ""


def _described(what: str, nans: int, infinities: int, numel: int) -> str:
    return f"{what} has {nans} NaN and {infinities} infinite of {numel} elements"


def _different_replicas(delivered: Iterable[ShardedParameter]) -> str:
    """Returns an error message if replicas of parameters differ, or "".

    Collective if ``delivered`` has parameters whose replicas were not compared. All parameters are
    compared, until they are equal once, that are in a model and on a mesh with one of these: only
    here do all ranks of a mesh meet after a model has got its values.
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
    for groups, members in _by_mesh(uncompared).items():
        told = _all_gather_lines(_COMPARISON, told + _differences(members, groups[-1]), groups)
        # Ranks of this mesh remember what all of them were told by now. Only some of them may be
        # told more, on the next mesh.
        for parameter in members:
            parameter.replicas_are_compared = not told
    if not told:
        return ""
    return (
        f"replicas have different values, and stay different: {_shortened(told)}. Before training, "
        "give all replicas the same values: call torch.manual_seed with one seed on all ranks "
        "before the model is built or initialised, load one checkpoint, or broadcast the values of "
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
    """Returns the checksum of the shard, or why it cannot be used: other ranks wait for either."""
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

    Of dtypes in which no gradient can be, they are the bytes.
    """
    if values.dtype not in grad_dtype.DTYPES:
        return values.view(torch.uint8)
    values = values.double() if values.element_size() == 8 else values.float()
    values = (values + 0.0).masked_fill_(values.isnan(), math.nan)
    return values.view(torch.int64 if values.element_size() == 8 else torch.int32)


def _by_mesh(parameters: Iterable[ShardedParameter]) -> dict[_Groups, list[ShardedParameter]]:
    """Returns ``parameters`` by the groups that they are sharded and replicated over.

    Small meshes come first. The order is the same on all ranks.
    """
    result: dict[_Groups, list[ShardedParameter]] = {}
    for parameter in sorted(parameters, key=lambda p: (p.layout.ranks.mesh.size(), p.fqn)):
        result.setdefault(parameter.layout.ranks.process_groups, []).append(parameter)
    return result


def _all_gather_lines(what: str, lines: Sequence[str], groups: _Groups) -> list[str]:
    """Returns the ``lines`` of all ranks of a mesh, each once. Collective over its ``groups``.

    The result for a small mesh among the lines for a larger one reaches all ranks of that.
    """
    for group in groups:  # first the shards' group, then the replicas': these get complete lines
        of_ranks = all_gather_json(what, lines, group)
        lines = list(dict.fromkeys(each for theirs in of_ranks for each in theirs))
    return list(lines)


def _shortened(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
    return "; ".join(lines[:8]) + more


@torch_internals.disable_dynamo
def _refresh(placeholder: torch.Tensor) -> None:
    """Refreshes a parameter before a gather for an op that ran none of our Python code.

    The runtime calls it.
    """
    parameter = parameter_of(placeholder)
    if parameter is None:
        return
    if publish_again_if_recomputing([parameter]):
        parameter.refresh()
        return
    changed = [p.fqn for p in group_of(parameter).parameters if not p.prepare_forward()]
    if changed:
        raise Zero3Error(
            f"requires_grad or grad_dtype of {', '.join(map(repr, changed))} changed since this "
            "graph was compiled; run the model again: it compiles anew"
        )


_C.set_deliver(_deliver)
_C.set_refresh(_refresh)
