"""Which ranks share memory, and how they come by it.

The ranks of a process group share memory where all of them run on one host and compute on its CPU.
They agree on that in ``fully_shard``, which is collective for this reason. Memory is an anonymous
file (``memfd_create``): it has no name that could be left behind, is not bounded by ``/dev/shm``,
and is open to processes of the same user that can see each other, through ``/proc``. What is done
with it is the runtime's: see ``docs/one_host.md``.
"""

import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C

_T = TypeVar("_T")

Transport = Literal["auto", "shared_memory", "c10d"]

# What "auto" means in this process, if not "auto".
ENVIRONMENT = "ZERO3_TRANSPORT"

# A rank's mailbox holds the largest gradient and so much more.
MAILBOX_BYTES = 32 << 20

_one_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, _C.OneHost] = weakref.WeakKeyDictionary()


class SharedMemory(NamedTuple):
    """What one parameter has in it: for each rank its progress, and the full tensor, twice."""

    one_host: _C.OneHost
    progress: torch.Tensor
    writable: torch.Tensor
    readable: torch.Tensor


class _Offer(NamedTuple):
    """What a rank says of itself: where it runs, and what it can show to others."""

    transport: Transport
    host: str
    pid: int
    fulls: tuple[str, ...]  # the parameters
    files: tuple[int, ...] = ()  # its descriptors of the segments, on the first rank
    trouble: str = ""


def resolve(transport: Transport) -> Transport:
    """The transport that an argument of ``fully_shard`` asks for.

    Raises:
        ValueError: there is no such transport.
    """
    source = "transport"
    if transport == "auto" and ENVIRONMENT in os.environ:
        transport, source = os.environ[ENVIRONMENT], ENVIRONMENT  # type: ignore[assignment]
    if transport not in get_args(Transport):
        names = ", ".join(map(repr, get_args(Transport)))
        raise ValueError(f"{source} is one of {names}, got {transport!r}")
    return transport


@torch.inference_mode(mode=False)  # or what is mapped could not be written to outside of it
def share(
    fulls: Sequence[torch.Tensor], group: dist.ProcessGroup, device: str, transport: Transport
) -> list[SharedMemory] | None:
    """Memory for gathers and reductions of ``fulls`` that the ranks of ``group`` share.

    Collective.

    Args:
        fulls: parameters as they are computed with, [rows, ...] each, on the meta device.
        group: the ranks.
        device: the type of device that they compute on.
        transport: of those of :func:`resolve`.

    Returns:
        The memory of each, or None: messages are exchanged.

    Raises:
        Zero3Error: ``transport`` or the parameters are not the same on all ranks, or it is
            ``"shared_memory"`` and that is not possible. A single rank has nobody to share with,
            and that is no error.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if not fulls or world_size == 1:
        return None
    if not _C.is_point_to_point(group.group_name, torch.device(device)):
        if transport == "shared_memory":
            raise Zero3Error(
                f"transport='shared_memory' needs a process group of gloo on CPUs; this one is "
                f"{dist.get_backend(group)}, and the mesh is on {device!r}"
            )
        return None  # as all ranks know without asking
    one_host = _one_hosts.get(group)
    layout = _Layout(fulls, world_size, one_host)
    described = tuple(f"{list(full.shape)} of {full.dtype}, {full.stride()}" for full in fulls)
    mine = _offer(transport, described, layout.sizes if rank == 0 else ())
    try:
        offers = _exchange(mine, group)
        if len({offer.transport for offer in offers}) > 1:
            asked = {rank: offer.transport for rank, offer in enumerate(offers)}
            raise Zero3Error(f"ranks disagree on the transport, {asked}: give all the same")
        for other, offer in enumerate(offers):
            _check_alike(described, offer.fulls, rank, other)
        if transport == "c10d":
            return None
        troubles = [_trouble(offer, offers[0]) for offer in offers]
        segments = []
        if not any(troubles):
            try:
                paths = [f"/proc/{offers[0].pid}/fd/{file}" for file in offers[0].files]
                segments = [_map(*file) for file in zip(paths, layout.sizes, strict=True)]
                # Again, at other addresses, where nobody can write to it.
                readable = _map(paths[-1], layout.sizes[-1])
                _C.make_read_only(readable)
            except (OSError, RuntimeError) as error:
                troubles[rank] = f"it cannot map memory of rank 0: {error}"
            troubles = _exchange(troubles[rank], group)
    finally:
        for file in mine.files:  # all have mapped them, or nobody will
            os.close(file)
    if any(troubles):
        if transport == "shared_memory":
            raise Zero3Error(
                "transport='shared_memory' is not possible: "
                + "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(troubles) if why)
            )
        return None
    if one_host is None:
        pids = [offer.pid for offer in offers]
        one_host = _C.OneHost(group.group_name, rank, pids, segments.pop(0))
        _one_hosts[group] = one_host
    if layout.mailbox_bytes:
        one_host.set_mailboxes(segments.pop(0).view(world_size, -1))
    progress, writable = segments
    return layout.parts(one_host, progress, writable, readable)


class _Layout:
    """The segments that some parameters need: one of the group, if it has none, one of mailboxes,
    if they are too small, one of progress, which may outlive the parameters, and their copies.
    """

    def __init__(
        self, fulls: Sequence[torch.Tensor], world_size: int, one_host: "_C.OneHost | None"
    ) -> None:
        self._fulls = fulls
        self._progress_bytes = world_size * _C.PROGRESS_BYTES
        # In double at most. Memory that is not touched is not taken.
        largest = max(full.numel() * 8 for full in fulls)
        mailbox_bytes = _round_up(largest + MAILBOX_BYTES, mmap.PAGESIZE)
        is_enough = one_host is not None and one_host.mailbox_bytes >= mailbox_bytes
        self.mailbox_bytes = 0 if is_enough else mailbox_bytes
        end = 0
        self._offsets = []
        for full in fulls:
            self._offsets.append(end)
            end = _round_up(end + full.nbytes, 64)
        sizes = [0 if one_host else _C.OneHost.control_bytes(world_size)]
        sizes += [world_size * self.mailbox_bytes, len(fulls) * self._progress_bytes, end]
        self.sizes = [_round_up(size, mmap.PAGESIZE) for size in sizes if size]

    def parts(
        self,
        one_host: "_C.OneHost",
        progress: torch.Tensor,
        writable: torch.Tensor,
        readable: torch.Tensor,
    ) -> list[SharedMemory]:
        """Each parameter's part of the last two segments."""
        result = []
        for index, full in enumerate(self._fulls):
            begin = self._offsets[index]
            copies = (
                memory[begin : begin + full.nbytes]
                .view(full.dtype)
                .as_strided(full.shape, full.stride())
                for memory in (writable, readable)
            )
            words = progress[index * self._progress_bytes :][: self._progress_bytes]
            result.append(SharedMemory(one_host, words, *copies))
        return result


def _map(path: str, nbytes: int) -> torch.Tensor:
    """The bytes of a file that all who map it share."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def _offer(transport: Transport, fulls: tuple[str, ...], sizes: Sequence[int]) -> _Offer:
    """This rank's, with a file for each of ``sizes``."""
    pid = os.getpid()
    if transport == "c10d":
        return _Offer(transport, "", pid, fulls)
    if sys.platform != "linux":
        return _Offer(transport, "", pid, fulls, trouble=f"{sys.platform} has no memfd_create")
    files: list[int] = []
    try:
        # Processes see each other's files if they are of one kernel, see the same processes, and
        # have the same rights.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
        for nbytes in sizes:
            files.append(os.memfd_create("zero3", os.MFD_CLOEXEC))
            os.fchmod(files[-1], 0o600)
            os.ftruncate(files[-1], nbytes)
    except OSError as error:
        for file in files:
            os.close(file)
        return _Offer(transport, "", pid, fulls, trouble=f"no memory to share: {error}")
    return _Offer(transport, host, pid, fulls, tuple(files))


def _check_alike(mine: Sequence[str], others: Sequence[str], rank: int, other: int) -> None:
    for position, (one, another) in enumerate(itertools.zip_longest(mine, others)):
        if one != another:
            raise Zero3Error(
                f"ranks disagree on the module's parameter {position}: it is {one} on rank {rank} "
                f"and {another} on rank {other} (shape, compute dtype, strides); build the same "
                "model with the same mp_policy on all ranks"
            )


def _trouble(offer: _Offer, first: _Offer) -> str:
    """Why the rank of ``offer`` cannot share memory with the ``first``, if it cannot."""
    if offer.trouble or offer.host == first.host:
        return offer.trouble
    return "it is on another host, in another container or another user's than rank 0"


def _exchange(value: _T, group: dist.ProcessGroup) -> list[_T]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _round_up(nbytes: int, unit: int) -> int:
    return (nbytes + unit - 1) // unit * unit
