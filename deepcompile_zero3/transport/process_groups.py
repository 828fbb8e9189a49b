"""Process groups of our own, beside those that a model is sharded over."""

import weakref
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.transport.timeouts import timeout_of


class _OwnGroup(NamedTuple):
    group: weakref.ref[dist.ProcessGroup]
    like: weakref.ref[dist.ProcessGroup]
    what: str


_own_groups: list[_OwnGroup] = []


def group_for_reductions(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a second group of the same ranks, for reductions.

    Gathers and reductions then need no common order. At which node of a backward a gather stands
    may depend on the batch, and so differ between ranks.
    """
    return _own_group(group, dist.get_process_group_ranks(group), "reductions")


def neighbors(group: dist.ProcessGroup, world_size: int) -> dist.ProcessGroup:
    """Returns the group of ``world_size`` consecutive ranks of ``group`` that has this rank."""
    first = group.rank() // world_size * world_size
    ranks = dist.get_process_group_ranks(group)[first : first + world_size]
    return _own_group(group, ranks, f"{first} to {first + world_size - 1}")


def flat_submesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Returns the slice of ``mesh`` with ``names``, which come in its order, as one dimension.

    If torch makes a process group for it, that waits as long as those of ``names`` do at most.
    """
    known = torch_internals.group_names()
    flat = torch_internals.flat_submesh(mesh, names)
    group = flat.get_group()
    if group.group_name not in known:
        torch_internals.set_timeout(max(timeout_of(mesh.get_group(each)) for each in names), group)
    return flat


def _own_group(like: dist.ProcessGroup, ranks: list[int], what: str) -> dist.ProcessGroup:
    """Returns the group for a purpose, made with the backend and the timeout of ``like``.

    Also destroys groups that were made like a group that was destroyed.
    """
    for own in list(_own_groups):
        group, other = own.group(), own.like()
        if group is not None and other is like and own.what == what:
            return group
        if not exists(other):
            _own_groups.remove(own)
            if exists(group):
                dist.destroy_process_group(group)
    name = f"{like.group_name}, {what}"
    group = torch_internals.new_process_group(name, ranks, like, timeout_of(like))
    _own_groups.append(_OwnGroup(weakref.ref(group), weakref.ref(like), what))
    return group


def exists(group: dist.ProcessGroup | None) -> bool:
    """Returns whether ``group`` was not destroyed.

    Meshes, which torch remembers, hold a group for longer.
    """
    try:
        return group is not None and dist.get_rank(group) >= 0
    except ValueError:
        return False
