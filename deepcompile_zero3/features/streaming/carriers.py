"""The two ways in which a bucket's full tensors come about: in shared memory, and by messages."""

from typing import Protocol

import torch
import torch.distributed as dist

from deepcompile_zero3.features.streaming.buckets import Bucket
from deepcompile_zero3.features.streaming.pieces import Box, Entry
from deepcompile_zero3.features.streaming.segments import Segments

_ALIGNMENT = 16  # of boxes in a message, for views of any dtype


class Carrier(Protocol):
    """Moves buckets, two at a time."""

    def start(self, bucket: Bucket, held: set[int]) -> None:
        """Sends this rank's boxes of ``bucket``. Collective.

        Args:
            bucket: the next bucket.
            held: segments that any process uses, the same on all ranks.
        """

    def finish(self) -> list[torch.Tensor] | None:
        """Returns the full tensors of the bucket that started first, or None if others get them.

        All ranks have told each other since that they have started it.
        """

    @property
    def held(self) -> set[int]:
        """Segments that this process uses."""

    def close(self) -> None:
        """Waits for what has started, and forgets it."""


class BySharedMemory:
    """Each rank writes its boxes to the full tensors' places in memory that all ranks share.

    Attributes:
        segments: the memory.
        latest: the segment of the bucket that finished last.
    """

    def __init__(self, segments: Segments, rank: int, gets_tensors: bool) -> None:
        self.segments = segments
        self._rank = rank
        self.latest = -1
        self._gets_tensors = gets_tensors
        self._started: list[tuple[Bucket, int]] = []

    def start(self, bucket: Bucket, held: set[int]) -> None:
        """See :class:`Carrier`."""
        # The bucket before is still being read on ranks that have no tensors of it too.
        number = self.segments.take(bucket.reserved, held | {self.latest})
        fulls = bucket.tensors_in(self.segments[number].lease())
        for entry, full in zip(bucket.entries, fulls, strict=True):
            for box in _boxes_from(entry, self._rank):
                box.of(full).copy_(entry.local.view(box.sizes))
        self._started.append((bucket, number))

    def finish(self) -> list[torch.Tensor] | None:
        """See :class:`Carrier`."""
        bucket, self.latest = self._started.pop(0)
        if not self._gets_tensors:
            return None
        return bucket.tensors_in(self.segments[self.latest].lease())

    @property
    def held(self) -> set[int]:
        """See :class:`Carrier`."""
        return self.segments.held

    def close(self) -> None:
        """See :class:`Carrier`."""
        self._started.clear()
        self.segments.close()


class ByMessages:
    """Each rank sends its boxes, as one message a bucket, to the ranks that get tensors."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, destination: int | None
    ) -> None:
        """Args:
        group: the ranks.
        device: device of messages and of full tensors.
        destination: the rank of ``group`` that gets tensors, or None for all.
        """
        self.held: set[int] = set()
        self._group = group
        self._device = device
        self._destination = destination
        self._rank = dist.get_rank(group)
        self._started: list[tuple[Bucket, dict[int, torch.Tensor], list[dist.Work]]] = []

    @property
    def _gets_tensors(self) -> bool:
        return self._destination in (None, self._rank)

    def start(self, bucket: Bucket, held: set[int]) -> None:
        """See :class:`Carrier`."""
        messages, works = {}, []
        for source in range(dist.get_world_size(self._group)):
            nbytes = sum(
                _padded(entry, box)
                for entry in bucket.entries
                for box in _boxes_from(entry, source)
            )
            is_mine = source == self._rank
            if not nbytes or not (is_mine or self._gets_tensors):
                continue
            if is_mine and self._destination == self._rank:
                continue
            if is_mine and dist.get_world_size(self._group) == 1:
                continue
            message = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            messages[source] = message
            if is_mine:
                for entry, box, part in self._parts(bucket, source, message):
                    part.copy_(entry.local.view(box.sizes))
            works.append(self._send(source, message))
        self._started.append((bucket, messages, works))

    def _send(self, source: int, message: torch.Tensor) -> dist.Work:
        """Starts to send a message, or to receive it."""
        if self._destination is None:
            root = dist.get_global_rank(self._group, source)
            work = dist.broadcast(message, root, group=self._group, async_op=True)
        elif source == self._rank:
            to = dist.get_global_rank(self._group, self._destination)
            work = dist.isend(message, to, group=self._group)
        else:
            root = dist.get_global_rank(self._group, source)
            work = dist.irecv(message, root, group=self._group)
        assert work is not None
        return work

    def finish(self) -> list[torch.Tensor] | None:
        """See :class:`Carrier`."""
        bucket, messages, works = self._started.pop(0)
        for work in works:
            work.wait()
        if not self._gets_tensors:
            return None
        fulls = {
            entry: torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
            for entry in bucket.entries
        }
        for source, message in messages.items():
            if source != self._rank:
                for entry, box, part in self._parts(bucket, source, message):
                    box.of(fulls[entry]).copy_(part)
        for entry, full in fulls.items():
            for box in _boxes_from(entry, self._rank):
                box.of(full).copy_(entry.local.view(box.sizes))
        return list(fulls.values())

    def _parts(
        self, bucket: Bucket, source: int, message: torch.Tensor
    ) -> list[tuple[Entry, Box, torch.Tensor]]:
        """Returns the boxes of a message, each with its view of the message."""
        parts, offset = [], 0
        for entry in bucket.entries:
            for box in _boxes_from(entry, source):
                nbytes = box.numel * entry.dtype.itemsize
                part = message[offset : offset + nbytes].view(entry.dtype).view(box.sizes)
                parts.append((entry, box, part))
                offset += _padded(entry, box)
        return parts

    def close(self) -> None:
        """See :class:`Carrier`."""
        for _, _, works in self._started:
            for work in works:
                work.wait()
        self._started.clear()


def _boxes_from(entry: Entry, rank: int) -> list[Box]:
    """Returns the boxes of ``entry`` that ``rank`` sends."""
    return [box for source, box in entry.sources if source == rank]


def _padded(entry: Entry, box: Box) -> int:
    """Returns the bytes that a box takes in a message."""
    return -(-box.numel * entry.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
