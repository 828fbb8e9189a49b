"""Timeouts of process groups, which bound each wait for another rank."""

import datetime
import warnings
import weakref
from collections.abc import Iterable

import torch.distributed as dist

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.guides import Guide
from deepcompile_zero3.runtime import _C


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    """Returns how long a rank of ``group`` waits for another one."""
    return datetime.timedelta(milliseconds=_C.timeout_of(group.group_name))


def warn_of_default_timeouts(groups: Iterable[dist.ProcessGroup]) -> None:
    """Warns of groups that wait for as long as torch's default, and the default group for less.

    ``init_device_mesh`` gives its groups torch's default, whatever ``init_process_group`` was given
    (https://github.com/pytorch/pytorch/issues/119613). Any other time was chosen by somebody, and
    so were the groups of one rank, which wait for nobody.

    Each group is named once, by its first rank.
    """
    world = dist.group.WORLD
    if world is None:
        return
    wanted = timeout_of(world)
    longer = {}
    for group in groups:
        if group.size() == 1 or group.rank() != 0 or group in _told:
            continue
        timeout = timeout_of(group)
        if timeout > wanted and timeout == torch_internals.default_timeout(group):
            longer[group] = timeout
    if not longer:
        return
    _told.update(longer)
    named = " and ".join(
        f"'{group.group_desc}' of ranks {dist.get_process_group_ranks(group)} for {timeout}"
        for group, timeout in longer.items()
    )
    warnings.warn(
        f"a rank that does not come is missed late. These groups wait: {named}. That is torch's "
        f"default, and init_process_group was given {wanted}: init_device_mesh does not pass it on "
        "to its groups. Set their timeouts ahead of fully_shard:\n"
        "    for group in mesh.get_all_groups():\n"
        "        torch.distributed.distributed_c10d._set_pg_timeout("
        f"timedelta(seconds={wanted.total_seconds():g}), group)\n"
        f"or ignore this warning if the longer time is meant. See {Guide.TIMEOUTS}",
        stacklevel=3,
    )


# The groups that a warning has named.
_told: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
