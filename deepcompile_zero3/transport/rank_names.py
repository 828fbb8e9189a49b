"""How messages name ranks: by their numbers in the job, and by their hosts if these are several."""

import socket
import weakref
from collections.abc import Iterable

import torch.distributed as dist

# Hosts by rank in the job, as far as ranks have told each other, by the job's default group.
_hosts: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, str]]"
_hosts = weakref.WeakKeyDictionary()


def this_rank() -> tuple[int, str]:
    """Returns what a rank tells others: its number in the job, and its host."""
    return dist.get_rank(), socket.gethostname()


def learn_hosts(ranks: Iterable[tuple[int, str]]) -> None:
    """Takes what ranks have told: see :func:`this_rank`."""
    _hosts_of_job().update(dict(ranks))


def rank_names(group: dist.ProcessGroup) -> list[str]:
    """Returns a name for each rank of ``group``: "3", or with several hosts "3 (host b)"."""
    hosts = _hosts_of_job()
    ranks = dist.get_process_group_ranks(group)
    is_among_several = len({hosts.get(rank) for rank in ranks}) > 1
    return [
        f"{rank} (host {hosts[rank]})" if is_among_several and rank in hosts else f"{rank}"
        for rank in ranks
    ]


def _hosts_of_job() -> dict[int, str]:
    world = dist.group.WORLD
    return {} if world is None else _hosts.setdefault(world, {})
