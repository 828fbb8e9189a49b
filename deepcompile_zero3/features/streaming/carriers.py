"""The two ways in which a bucket's full tensors come about: in shared memory, and by messages."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from deepcompile_zero3.features.streaming.buckets import Bucket
from deepcompile_zero3.features.streaming.host_memory import HostMemory
from deepcompile_zero3.features.streaming.pieces import Box, Entry
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.transport.json_collectives import all_gather_codes

_ALIGNMENT = 16  # of boxes in a message, for views of any dtype


# Buckets of one host cost little, and small ones need few pages.
HOST_BUCKET_BYTES = 16 << 20


class Carrier(Protocol):
    """Moves buckets, two at a time, and lets ranks agree to go on.

    Attributes:
        most_bytes: size of a bucket of several tensors, beyond which it is of no use.
    """

    most_bytes: float

    def agree(self, where: str, stopped: str, held_outside: set[int]) -> list[str]:
        """Waits for all ranks. Collective.

        Args:
            where: where this rank is, for messages.
            stopped: why this rank does not go on, or "".
            held_outside: segments that a process outside of the job uses, as this rank knows.

        Returns:
            Why each rank does not go on, or "".

        Raises:
            Zero3Error: a rank has died, or does not come in time.
        """

    def has_room(self, buckets: Sequence[Bucket]) -> bool:
        """Returns whether the last of ``buckets`` may start now. The same on all ranks.

        Args:
            buckets: the next bucket, after the one that finished last, on which the consumer will
                work, and after the one before, of which the consumer's loop still names a tensor.
        """

    def start(self, bucket: Bucket) -> None:
        """Sends this rank's boxes of the next ``bucket``. Collective."""

    def finish(self) -> list[torch.Tensor] | None:
        """Returns the full tensors of the bucket that started first, or None if others get them.

        All ranks have agreed since that they have started it.
        """

    def close(self, is_complete: bool) -> None:
        """Waits for what has started, and forgets it.

        Args:
            is_complete: whether all ranks have agreed that they are at the end.
        """


class BySharedMemory:
    """Each rank writes its boxes to the full tensors' places in memory that all ranks share.

    Attributes:
        segments: the memory.
        latest: the segment of the bucket that finished last, if ranks have not agreed since.
    """

    most_bytes: float = HOST_BUCKET_BYTES

    def __init__(
        self, memory: HostMemory, rank: int, destination: int | None, is_read_outside: bool
    ) -> None:
        """Args:
        memory: the ranks' memory.
        rank: this rank.
        destination: the rank that gets tensors, or None for all.
        is_read_outside: whether a process outside of the job reads the memory.
        """
        self.segments = memory.segments
        self.latest = -1
        self._memory = memory
        self._rank = rank
        self._gets_tensors = destination in (None, rank)
        self._is_read_outside = is_read_outside
        self._held: set[int] = set()  # segments that any process uses
        self._started: list[tuple[Bucket, int]] = []

    def agree(self, where: str, stopped: str, held_outside: set[int]) -> list[str]:
        """See :class:`Carrier`."""
        word = self.segments.word_of(self.segments.held | held_outside)
        line = stopped.encode("utf-8", "replace")[: _C.HostExchange.LINE_BYTES]
        said = self._memory.exchange.exchange(word, line.decode("utf-8", "ignore"), where)
        self._held = {number for each, _ in said for number in self.segments.numbers_in(each)}
        self.latest = -1
        return [each for _, each in said]

    @property
    def _used(self) -> set[int]:
        # Ranks that get no tensors of the latest bucket do not write to it either. A rank that was
        # interrupted has buckets that the others have finished.
        return self._held | {self.latest} | {number for _, number in self._started}

    def has_room(self, buckets: Sequence[Bucket]) -> bool:
        """See :class:`Carrier`."""
        bucket = buckets[-1]
        nbytes = self.segments.nbytes_with(bucket.nbytes, self._used, bucket.largest)
        return nbytes <= bucket.most_bytes

    def start(self, bucket: Bucket) -> None:
        """See :class:`Carrier`."""
        number = self.segments.take(bucket.nbytes, self._used, bucket.largest, bucket.most_bytes)
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

    def close(self, is_complete: bool) -> None:
        """See :class:`Carrier`."""
        self._started.clear()
        if not is_complete:
            self.segments.shrink(0)
            return
        if self._is_read_outside:  # nobody will tell when that process has dropped its tensors
            for number in self._held:
                self.segments.drop(number)
        self._memory.keep()


class ByMessages:
    """Each rank sends its boxes, as one message a bucket, to the ranks that get tensors."""

    most_bytes = math.inf

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, destination: int | None
    ) -> None:
        """Args:
        group: the ranks.
        device: device of messages and of full tensors.
        destination: the rank of ``group`` that gets tensors, or None for all.
        """
        self._group = group
        self._device = device
        self._destination = destination
        self._rank = dist.get_rank(group)
        self._started: list[tuple[Bucket, dict[int, torch.Tensor], list[dist.Work]]] = []

    @property
    def _gets_tensors(self) -> bool:
        return self._destination in (None, self._rank)

    def agree(self, where: str, stopped: str, held_outside: set[int]) -> list[str]:
        """See :class:`Carrier`."""
        said = all_gather_codes(where, None if stopped else 0, stopped, self._group)
        return ["" if isinstance(each, int) else each for each in said]

    def has_room(self, buckets: Sequence[Bucket]) -> bool:
        """See :class:`Carrier`."""
        return sum(bucket.nbytes for bucket in buckets) <= buckets[-1].most_bytes

    def start(self, bucket: Bucket) -> None:
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
        root = dist.get_global_rank(self._group, source)
        begin: Callable[[], dist.Work | None]
        if self._destination is None:
            begin = partial(dist.broadcast, message, root, group=self._group, async_op=True)
        elif source == self._rank:
            to = dist.get_global_rank(self._group, self._destination)
            begin = partial(dist.isend, message, to, group=self._group)
        else:
            begin = partial(dist.irecv, message, root, group=self._group)
        work = _C.begin_unseen(begin)
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

    def close(self, is_complete: bool) -> None:
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
