"""How messages name ranks: by their numbers in the job, and by their hosts if these are several."""

import socket
from collections.abc import Iterable

import torch.distributed as dist

_hosts: dict[int, str] = {}  # by rank in the job, as far as they have told each other


def this_rank() -> tuple[int, str]:
    """Returns what a rank tells others: its number in the job, and its host."""
    return dist.get_rank(), socket.gethostname()


def learn_hosts(ranks: Iterable[tuple[int, str]]) -> None:
    """Takes what ranks have told: see :func:`this_rank`."""
    _hosts.update(dict(ranks))


def rank_names(group: dist.ProcessGroup) -> list[str]:
    """Returns a name for each rank of ``group``: "3", or with several hosts "3 (host b)"."""
    ranks = dist.get_process_group_ranks(group)
    is_among_several = len({_hosts.get(rank) for rank in ranks}) > 1
    return [
        f"{rank} (host {_hosts[rank]})" if is_among_several and rank in _hosts else f"{rank}"
        for rank in ranks
    ]
