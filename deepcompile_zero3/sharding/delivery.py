"""What the runtime calls: when it has reduced gradients, and before it gathers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.group import ParameterGroup, group_of
from deepcompile_zero3.sharding.parameter import ShardedParameter, find
from deepcompile_zero3.transport.json_collectives import all_gather_json

_REDUCED = "once it was reduced"
_ODD = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, an odd int64: spreads hashes

# The process groups of a mesh: see DataParallel.groups.
_Groups = tuple[dist.ProcessGroup, ...]


@torch_internals.disable_dynamo
def _deliver(gradients: Sequence[tuple[_C.Parameter, torch.Tensor]]) -> None:
    """Adds the reduced gradients of a backward to ``.grad``. The runtime calls this at its end."""
    # A parameter that is missing was deleted during its own backward.
    delivered = [(p, reduced) for handle, reduced in gradients if (p := find(handle.placeholder))]
    if any(parameter.settings.detects_nonfinite for parameter, _ in delivered):
        _raise_if_nonfinite(delivered)
    if uncompared := [p for p, _ in delivered if not p.replicas_are_compared]:
        _raise_if_replicas_differ(uncompared)
    for parameter, _ in delivered:
        parameter.check_unchanged()
    _run_all_reduce_hooks(delivered)
    for parameter, reduced in delivered:
        parameter.accumulate_grad(reduced)
    for parameter in dict.fromkeys(parameter for parameter, _ in delivered):
        shard = parameter.shard
        for hook in torch_internals.post_accumulate_grad_hooks(shard):
            hook(shard)


def _run_all_reduce_hooks(reduced: Sequence[tuple[ShardedParameter, torch.Tensor]]) -> None:
    """Lets the hooks of groups change the gradients that were reduced.

    Hooks may communicate: all ranks call them in one order, with parameters in one order.
    """
    hooked: dict[tuple[ParameterGroup, torch.dtype], list[torch.Tensor]] = {}
    # Gradients arrive in other orders on ranks that compute them differently.
    for parameter, shard in sorted(reduced, key=lambda each: each[0].position):
        group = None if parameter.group is None else parameter.group()
        if group is not None and group.all_reduce_hook is not None:
            hooked.setdefault((group, shard.dtype), []).append(shard)
    for (group, _), shards in hooked.items():
        hook = cast(Callable[[torch.Tensor], None], group.all_reduce_hook)
        with torch.no_grad():
            flat = torch.cat([shard.reshape(-1) for shard in shards])
            hook(flat)
            for shard, part in zip(shards, flat.split([s.numel() for s in shards]), strict=True):
                shard.copy_(part.view_as(shard))


def _raise_if_nonfinite(reduced: Sequence[tuple[ShardedParameter, torch.Tensor]]) -> None:
    """Raises Zero3Error on all ranks if a gradient that was reduced is not finite.

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
    told = _tell("detect_nonfinite", found)
    if told:
        # A sum of such gradients is not finite either: the cause comes first.
        first = sorted(told, key=lambda each: _REDUCED in each)
        raise Zero3Error("gradients are not finite. " + _shortened(first))


def _described(what: str, nans: int, infinities: int, numel: int) -> str:
    return f"{what} has {nans} NaN and {infinities} infinite of {numel} elements"


def _raise_if_replicas_differ(delivered: Sequence[ShardedParameter]) -> None:
    """Raises Zero3Error on all ranks if replicas of parameters differ. Collective.

    All parameters are compared, once, that are in a model and on a mesh with one of ``delivered``:
    only here do all ranks of a mesh meet after a model has got its values.
    """
    meshes = {(parameter.model, parameter.layout.ranks.groups) for parameter in delivered}
    parameters = {
        *delivered,
        *(
            parameter
            for model, groups in meshes
            if model is not None
            for parameter in model.parameters
            if parameter.layout.ranks.groups == groups and not parameter.replicas_are_compared
        ),
    }
    found: dict[ShardedParameter, list[str]] = {parameter: [] for parameter in parameters}
    for (*_, replicas), members in _by_mesh(parameters).items():
        sums = {p.fqn: _checksum(torch_internals.local_tensor(p.shard)) for p in members}
        first, *others = all_gather_json("comparison of replicas", sums, replicas)
        first_rank, *ranks = dist.get_process_group_ranks(replicas)
        for parameter in members:
            fqn = parameter.fqn
            found[parameter] = [
                f"'{fqn}' on rank {rank} is not what it is on rank {first_rank}"
                for rank, theirs in zip(ranks, others, strict=True)
                if theirs.get(fqn) != first.get(fqn)
            ]
    if told := _tell("comparison of replicas", found):
        raise Zero3Error(
            f"replicas have different values, and stay different: {_shortened(told)}. Before "
            "training, give all replicas the same values: call torch.manual_seed with one seed on "
            "all ranks before the model is built or initialised, or load one checkpoint"
        )
    for parameter in parameters:
        parameter.replicas_are_compared = True


def _checksum(shard: torch.Tensor) -> int | None:
    """Returns a hash of the bits of ``shard``, or None if it has no values yet.

    A sum of bits alone would be the same for values that are negated or in another order.
    """
    if shard.is_meta:
        return None
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = shard.detach().contiguous().view(integers[shard.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    start = 0
    for piece in bits.split(1 << 16):  # small enough for a processor's cache
        hashes = torch.arange(start, start + piece.numel(), device=bits.device)
        start += piece.numel()
        hashes.mul_(_ODD).add_(piece)
        hashes.bitwise_xor_(hashes >> 32).mul_(_ODD)
        total += hashes.bitwise_xor_(hashes >> 32).sum()
    return int(total)


def _by_mesh(parameters: Iterable[ShardedParameter]) -> dict[_Groups, list[ShardedParameter]]:
    """Returns ``parameters`` by the groups that they are sharded and replicated over.

    Small meshes come first. The order is the same on all ranks.
    """
    result: dict[_Groups, list[ShardedParameter]] = {}
    for parameter in sorted(parameters, key=lambda p: (p.layout.ranks.mesh.size(), p.fqn)):
        result.setdefault(parameter.layout.ranks.groups, []).append(parameter)
    return result


def _tell(what: str, found: Mapping[ShardedParameter, Sequence[str]]) -> list[str]:
    """Returns what the ranks of the parameters' meshes ``found``. Collective over these meshes.

    What the ranks of a small mesh found reaches all ranks of a larger one.
    """
    told: list[str] = []
    for groups, members in _by_mesh(found).items():
        told += [each for parameter in members for each in found[parameter]]
        for group in groups:  # replicas get what all ranks of a shard group found
            everything = all_gather_json(what, told, group)
            told = list(dict.fromkeys(each for theirs in everything for each in theirs))
    return told


def _shortened(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
    return "; ".join(lines[:8]) + more


@torch_internals.disable_dynamo
def _refresh(placeholder: torch.Tensor) -> None:
    """Refreshes a parameter before a gather for an op that ran none of our Python code.

    The runtime calls it.
    """
    parameter = find(placeholder)
    if parameter is None:
        return
    if _C.running_backward() != -1:  # recomputes a forward; which one is unknown
        parameter.refresh()
        _C.invalidate([parameter.handle])
        return
    changed = [p.fqn for p in group_of(parameter).parameters if not p.settle()]
    if changed:
        raise Zero3Error(
            f"requires_grad or grad_dtype of {', '.join(map(repr, changed))} changed since this "
            "graph was compiled; run the model again: it compiles anew"
        )


_C.set_deliver(_deliver)
_C.set_refresh(_refresh)
