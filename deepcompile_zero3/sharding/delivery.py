"""What the runtime calls: when it has reduced gradients, and before it gathers."""

from collections.abc import Callable, Sequence
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


@torch_internals.disable_dynamo
def _deliver(gradients: Sequence[tuple[_C.Parameter, torch.Tensor]]) -> None:
    """Adds the reduced gradients of a backward to ``.grad``. The runtime calls this at its end."""
    # A parameter that is missing was deleted during its own backward.
    delivered = [(p, reduced) for handle, reduced in gradients if (p := find(handle.placeholder))]
    if any(parameter.settings.detects_nonfinite for parameter, _ in delivered):
        _raise_if_nonfinite(delivered)
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
    found: dict[tuple[dist.ProcessGroup, ...], list[str]] = {}
    for parameter, shard in reduced:
        if not parameter.settings.detects_nonfinite:
            continue
        mine = found.setdefault(parameter.layout.ranks.groups, [])
        what = f"rank {dist.get_rank()}: that of '{parameter.fqn}'"
        if nonfinite := parameter.handle.take_nonfinite():
            mine.append(_described(f"{what}, before it was reduced,", *nonfinite))
        elif not torch.isfinite(shard).all():
            nans, infinities = int(shard.isnan().sum()), int(shard.isinf().sum())
            mine.append(_described(f"{what}, {_REDUCED},", nans, infinities, shard.numel()))
    told: dict[str, None] = {}
    for groups, mine in sorted(found.items(), key=lambda item: [g.group_name for g in item[0]]):
        # Replicas get what all ranks of a shard group found.
        for group in groups:
            mine = [
                each
                for theirs in all_gather_json("detect_nonfinite", mine, group)
                for each in theirs
            ]
        told.update(dict.fromkeys(mine))
    if told:
        # A sum of such gradients is not finite either: the cause comes first.
        first = sorted(told, key=lambda each: _REDUCED in each)
        more = f"; and {len(first) - 8} more" if len(first) > 8 else ""
        raise Zero3Error("gradients are not finite. " + "; ".join(first[:8]) + more)


def _described(what: str, nans: int, infinities: int, numel: int) -> str:
    return f"{what} has {nans} NaN and {infinities} infinite of {numel} elements"


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
