"""Memory that the ranks of one host share.

The ranks of a process group share memory if all of them run on one host and compute on its CPU.
They agree on that in ``fully_shard``, which is collective for this reason. What the runtime does
with the memory is described in ``docs/one_host.md``.
"""

import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.transport.choice import TransportName
from deepcompile_zero3.transport.json_collectives import all_gather_json
from deepcompile_zero3.transport.process_groups import exists
from deepcompile_zero3.transport.rank_names import rank_names
from deepcompile_zero3.transport.shared_files import SharedFile, host_of_this_process, opened

# A rank's mailbox holds the largest gradient and this many bytes more.
MAILBOX_BYTES = 32 << 20

# Copies that are gathered again in backward take turns in this many bytes, or in three times the
# largest copy: one of the current bucket, one of the next, and one of the last bucket, whose list
# a compiled graph still refers to.
RING_BYTES = 256 << 20

_one_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.OneHost] = weakref.WeakKeyDictionary()
_rings: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.CopyMemory] = weakref.WeakKeyDictionary()


class MappedMemory(NamedTuple):
    """Shared memory of one parameter: the progress of each rank, and the copy of the parameter."""

    one_host: _C.OneHost
    progress: torch.Tensor
    copy_memory: _C.CopyMemory
    takes_turns: bool


class _Offer(NamedTuple):
    """A rank's message to the others: where it runs, and which memory they can map."""

    transport: TransportName
    host: str
    pid: int
    files: Sequence[tuple[int, str]] = ()  # number and nonce of each segment, from the first rank
    trouble: str = ""


@torch.inference_mode(mode=False)  # else mapped memory could not be written to outside of it
def share(
    fulls: Sequence[torch.Tensor],
    layouts: Sequence[_C.RowLayout],
    group: dist.ProcessGroup,
    device: str,
    transport: TransportName,
    take_turns: bool,
) -> list[MappedMemory] | None:
    """Maps memory for gathers and reductions of ``fulls`` that the ranks of ``group`` share.

    Collective.

    Args:
        fulls: parameters as they are computed with, [rows, ...] each, on the meta device.
        layouts: for each parameter, the rows that each rank of ``group`` has.
        group: process group of the ranks.
        device: type of the device that the ranks compute on.
        transport: the transport that is asked for.
        take_turns: whether all copies of the group take turns in a bounded memory. Otherwise each
            has its own memory.

    Returns:
        The memory of each parameter, or None if ranks exchange messages.

    Raises:
        Zero3Error: ``transport`` differs between ranks, or is ``"shared_memory"`` and that is not
            possible. A single rank has no other rank to share with, which is not an error.
    """
    for memory in (_one_hosts, _rings):
        for known in list(memory):
            if not exists(known):
                del memory[known]
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return None
    is_allowed = transport in ("auto", "shared_memory")
    is_possible = device == "cpu" and (
        _C.backend_name(group.group_name, torch.device(device)) == "gloo"
    )
    segments = None
    if fulls and is_possible and is_allowed:
        segments = _Segments(fulls, layouts, group, take_turns)
    mine, files = _offer(transport, is_allowed, segments.sizes if segments and rank == 0 else ())
    try:
        offers = [_Offer(*offer) for offer in all_gather_json("fully_shard: memory", mine, group)]
        if len({offer.transport for offer in offers}) > 1:
            asked = [
                f"{offer.transport!r} on rank {name}"
                for name, offer in zip(rank_names(group), offers, strict=True)
            ]
            raise Zero3Error(
                f"ranks disagree on the transport, {', '.join(asked)}: give all the same"
            )
        if transport == "shared_memory" and not is_possible:
            raise Zero3Error(
                f"transport='shared_memory' needs a process group of gloo on CPUs; this one is "
                f"{dist.get_backend(group)}, and the mesh is on {device!r}"
            )
        if segments is None:
            return None
        troubles = [_trouble(offer, offers[0]) for offer in offers]
        if not any(troubles):
            try:
                segments.map(offers[0])
            except Exception as error:
                troubles[rank] = f"it cannot map memory of rank 0: {error}"
            troubles = all_gather_json("fully_shard: mapping", troubles[rank], group)
    finally:
        for file in files:  # all ranks have mapped them, or none will
            file.close()
    if any(troubles):
        if transport == "shared_memory":
            raise Zero3Error(
                "transport='shared_memory' is not possible: "
                + "; ".join(
                    f"rank {name}: {why}"
                    for name, why in zip(rank_names(group), troubles, strict=True)
                    if why
                )
            )
        return None
    return segments.parts([offer.pid for offer in offers])


class _Segments:
    """Segments of memory that some parameters need, beyond what their group has mapped."""

    def __init__(
        self,
        fulls: Sequence[torch.Tensor],
        layouts: Sequence[_C.RowLayout],
        group: dist.ProcessGroup,
        take_turns: bool,
    ) -> None:
        self._fulls = fulls
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._one_host = _one_hosts.get(group)
        self._takes_turns = take_turns
        self._ring = _rings.get(group) if take_turns else None
        self._offsets: list[int] = []  # offsets of copies with places of their own
        self._mapped: dict[str, torch.Tensor] = {}
        self._nbytes: dict[str, int] = {}

        if self._one_host is None:
            self._nbytes["control"] = _C.OneHost.control_bytes(self._world_size)
        # For at most float64. Pages that nobody touches take no memory, unless all are reserved.
        mailbox = _round_up(max(full.numel() * 8 for full in fulls) + MAILBOX_BYTES, mmap.PAGESIZE)
        if self._one_host is None or self._one_host.mailbox_bytes < mailbox:
            self._nbytes["mailboxes"] = self._world_size * mailbox
        self._progress_bytes = [
            _C.progress_bytes(layout, full.nbytes // full.shape[0])
            for full, layout in zip(fulls, layouts, strict=True)
        ]
        self._nbytes["progress"] = sum(self._progress_bytes)  # may outlive the parameters
        if take_turns:
            largest = max(full.nbytes for full in fulls)
            needed = max(RING_BYTES, 3 * _round_up(largest, _C.CACHE_LINE))
            if self._ring is None or self._ring.nbytes < needed:
                self._nbytes["ring"] = needed
        else:
            end = 0
            for full in fulls:
                self._offsets.append(end)
                end = _round_up(end + full.nbytes, _C.CACHE_LINE)
            self._nbytes["copies"] = max(end, 1)
        self._nbytes = {name: _round_up(n, mmap.PAGESIZE) for name, n in self._nbytes.items()}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the segments in bytes."""
        return tuple(self._nbytes.values())

    def map(self, offer: _Offer) -> None:
        """Maps the segments from the files of the first rank's ``offer``, of :attr:`sizes`.

        Raises:
            OSError, RuntimeError: mapping is not possible, or the files are others.
        """
        for (name, nbytes), (number, nonce) in zip(self._nbytes.items(), offer.files, strict=True):
            with opened(offer.pid, number, nonce, nbytes) as file:
                self._mapped[name] = _map(file, nbytes)
                if name in ("copies", "ring"):
                    # Maps it again at other addresses, where nobody can write to it.
                    self._mapped[f"{name}, to read"] = readable = _map(file, nbytes)
                    _C.make_read_only(readable)

    def parts(self, pids: Sequence[int]) -> list[MappedMemory]:
        """Returns the memory of each parameter, once all ranks have mapped the segments."""
        one_host = self._one_host
        if one_host is None:
            rank = dist.get_rank(self._group)
            names = rank_names(self._group)
            control = self._mapped["control"]
            one_host = _C.OneHost(self._group.group_name, rank, names, pids, control)
            _one_hosts[self._group] = one_host
        if "mailboxes" in self._mapped:
            one_host.set_mailboxes(self._mapped["mailboxes"].view(self._world_size, -1))
        if "ring" in self._mapped:
            memory = self._mapped["ring"], self._mapped["ring, to read"]
            if self._ring is None:
                self._ring = _rings[self._group] = _C.CopyMemory(*memory)
            else:
                self._ring.grow(*memory)
        progress = self._mapped["progress"][: sum(self._progress_bytes)]
        words = progress.split(self._progress_bytes)
        return [
            MappedMemory(one_host, words[index], self._ring or self._copy(index), self._takes_turns)
            for index in range(len(self._fulls))
        ]

    def _copy(self, index: int) -> _C.CopyMemory:
        begin, nbytes = self._offsets[index], self._fulls[index].nbytes
        names = ("copies", "copies, to read")
        return _C.CopyMemory(*(self._mapped[name][begin : begin + nbytes] for name in names))


def _map(file: int, nbytes: int) -> torch.Tensor:
    """Maps a file as a tensor of bytes, which all processes that map the file share."""
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8)


def _offer(
    transport: TransportName, is_allowed: bool, sizes: Sequence[int]
) -> tuple[_Offer, list[SharedFile]]:
    """Returns this rank's offer, with a file for each of ``sizes`` if ``transport`` allows any."""
    pid = os.getpid()
    if not is_allowed:
        return _Offer(transport, "", pid), []
    if sys.platform != "linux":
        return _Offer(transport, "", pid, trouble=f"{sys.platform} has no memfd_create"), []
    try:
        host = host_of_this_process()
        files = [SharedFile(nbytes) for nbytes in sizes]
    except Exception as error:  # any error: other ranks wait for this rank's offer
        return _Offer(transport, "", pid, trouble=f"no memory to share: {error}"), []
    return _Offer(transport, host, pid, [(file.number, file.nonce) for file in files]), files


def _trouble(offer: _Offer, first: _Offer) -> str:
    """Returns why the rank of ``offer`` cannot share memory with the ``first``, or ""."""
    if offer.trouble or offer.host == first.host:
        return offer.trouble
    return (
        "it is on another host, in another container, another user's or has another build of "
        "deepcompile_zero3 than rank 0"
    )


def _round_up(nbytes: int, unit: int) -> int:
    return (nbytes + unit - 1) // unit * unit
