"""Memory and words that the ranks of one host share for streams, from one stream to the next.

The first touch of a page costs some ten times as much as a copy to it. The ranks of a process group
therefore keep :data:`KEPT_BYTES` of their last stream's segments, until ``release_buffers()`` or
the group's end.
"""

import itertools
import weakref

import torch
import torch.distributed as dist

from deepcompile_zero3.features.streaming.segments import NoSharedMemory, Segments, share
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.runtime.buffers import RELEASES
from deepcompile_zero3.transport.json_collectives import all_gather_codes, all_gather_json
from deepcompile_zero3.transport.process_groups import exists
from deepcompile_zero3.transport.rank_names import rank_names
from deepcompile_zero3.transport.shared_files import host_of_this_process

KEPT_BYTES = 256 << 20
RULE = "all ranks iterate to the end, or leave in the same bucket"
_NUMBER_BITS = 24

_numbers = itertools.count()
_kept: "weakref.WeakKeyDictionary[dist.ProcessGroup, HostMemory]" = weakref.WeakKeyDictionary()


class HostMemory:
    """What the ranks of a stream share.

    Attributes:
        number: a number that they have in common, and no earlier memory had.
        segments: memory for buckets.
        exchange: tells all ranks a word and a line of text, in rounds.
    """

    def __init__(self, what: str, group: dist.ProcessGroup) -> None:
        """Collective. Raises NoSharedMemory on all ranks if it is not possible."""
        self._group = weakref.ref(group)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        mapping, _, pids = share(what, _C.HostExchange.nbytes(world_size), group)
        words = torch.frombuffer(mapping.lease(), dtype=torch.uint8)
        names = rank_names(group)
        self.exchange = _C.HostExchange(group.group_name, rank, names, pids, words, RULE)
        self.segments = Segments(what, group)
        mine = next(_numbers) % 2**_NUMBER_BITS
        said = self.exchange.exchange(mine, "", "the first round")
        self.number = said[0][0]

    def keep(self) -> None:
        """Lets the group's next stream take this memory."""
        self.segments.shrink(KEPT_BYTES)
        group = self._group()
        if group is not None:
            _kept[group] = self


def take_memory(what: str, group: dist.ProcessGroup) -> HostMemory:
    """Returns memory that the ranks of ``group`` share. Collective.

    Raises:
        NoSharedMemory: on all ranks: they cannot share memory.
    """
    for known in list(_kept):
        if not exists(known):
            del _kept[known]
    kept = _kept.pop(group, None)
    number = kept.number if kept is not None else None
    numbers = all_gather_codes(f"{what}: kept memory", number, "", group)
    if kept is not None and {*numbers} == {number}:
        return kept
    try:
        mine = [host_of_this_process(), ""]
    except OSError as error:
        mine = ["", str(error)]
    hosts = all_gather_json(f"{what}: hosts", mine, group)
    trouble = next((why for _, why in hosts if why), "")
    if trouble or len({host for host, _ in hosts}) > 1:
        raise NoSharedMemory(
            trouble
            or "ranks are on several hosts, in several containers or of several users, or have "
            "several builds of deepcompile_zero3"
        )
    return HostMemory(what, group)


def release_memory() -> int:
    """Frees memory that is kept for the next streams, and returns its size in bytes."""
    nbytes = sum(memory.segments.nbytes for memory in _kept.values())
    _kept.clear()
    return nbytes


RELEASES.append(release_memory)
