"""Memory that the ranks of one host share, and use again once nobody has tensors in it.

A segment is a file of ``transport/shared_files.py``.
"""

import mmap
import os
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.transport.json_collectives import all_gather_json
from deepcompile_zero3.transport.on_all_ranks import line_of
from deepcompile_zero3.transport.rank_names import rank_names
from deepcompile_zero3.transport.shared_files import SharedFile, opened

_MOST = 64  # segments, so that a word has a bit for each


class NoSharedMemory(Zero3Error):
    """Ranks cannot share memory, and all of them know."""


class Mapping:
    """A segment as one process has mapped it.

    Attributes:
        nbytes: its size.
        touched: bytes from its beginning that had tensors at some time, whose pages it has taken.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.touched = 0
        self._map = mmap.mmap(file, nbytes)
        self._lease: weakref.ref[memoryview] | None = None

    def lease(self) -> memoryview:
        """Returns the memory. It is in use as long as this object, or a tensor over it, lives."""
        lease = memoryview(self._map)
        self._lease = weakref.ref(lease)
        return lease

    @property
    def is_held(self) -> bool:
        """Whether a tensor over the latest lease lives."""
        return self._lease is not None and self._lease() is not None


class Shared(NamedTuple):
    """New memory that ranks share.

    Attributes:
        mapping: the memory, zeros.
        file: on the first rank, the file.
        pids: processes of the ranks.
    """

    mapping: Mapping
    file: SharedFile | None
    pids: list[int]


class Segments:
    """The segments of a stream, the same on all ranks.

    A segment in which a consumer keeps tensors is not used again before it has dropped them. There
    are at most 64: the one that was used longest ago leaves for a new one, and its tensors stay.

    Attributes:
        files: on the first rank, the file of each segment.
    """

    def __init__(self, what: str, group: dist.ProcessGroup | None) -> None:
        """Args:
        what: name of the call, for messages.
        group: ranks that share the segments, or None for this process alone.
        """
        self._what = what
        self._group = None if group is None else weakref.ref(group)
        self._mapped: dict[int, Mapping] = {}  # the one that was taken last comes last
        self._next = 0
        self.files: dict[int, SharedFile] = {}

    def take(self, nbytes: int, used: set[int], largest: int, most_bytes: int = 0) -> int:
        """Returns the number of a segment that nobody uses. Collective if there is none.

        Args:
            nbytes: bytes that are needed of it.
            used: segments in which a process has tensors, or a bucket is; the same on all ranks.
            largest: bytes of the largest bucket. A new segment has its size, unless all pages would
                be taken at once. A segment with more pages, of an earlier stream, is not taken.
            most_bytes: maximum size of all segments; unused ones beyond it are freed.

        Raises:
            NoSharedMemory: a rank cannot make or map a new segment.
        """
        number = self._free_for(nbytes, used, largest)
        growth = self.nbytes_with(nbytes, used, largest) - self.nbytes
        self.shrink(most_bytes - growth, used if number is None else used | {number})
        if number is None:
            number = self._create(nbytes if kernel_never_overcommits() else largest)
        mapping = self._mapped[number] = self._mapped.pop(number)
        mapping.touched = max(mapping.touched, nbytes)
        return number

    def nbytes_with(self, nbytes: int, used: set[int], largest: int) -> int:
        """Returns what :attr:`nbytes` will be once :meth:`take` has returned a segment."""
        number = self._free_for(nbytes, used, largest)
        touched = 0 if number is None else self._mapped[number].touched
        return self.nbytes + max(nbytes - touched, 0)

    def _free_for(self, nbytes: int, used: set[int], largest: int) -> int | None:
        """Returns the segment that needs the fewest new pages."""
        free = {
            number: mapping.touched
            for number, mapping in self._mapped.items()
            if number not in used and mapping.nbytes >= nbytes and mapping.touched <= largest
        }
        return min(free, key=lambda each: (max(nbytes - free[each], 0), free[each]), default=None)

    def __getitem__(self, number: int) -> Mapping:
        return self._mapped[number]

    @property
    def held(self) -> set[int]:
        """Segments in which this process has tensors."""
        return {number for number, mapping in self._mapped.items() if mapping.is_held}

    @property
    def nbytes(self) -> int:
        """Memory that all segments take."""
        return sum(mapping.touched for mapping in self._mapped.values())

    def word_of(self, numbers: set[int]) -> int:
        """Returns ``numbers`` of segments in 64 bits, for a rank that has the same segments."""
        return sum(1 << bit for bit, number in enumerate(self._mapped) if number in numbers)

    def numbers_in(self, word: int) -> set[int]:
        """Returns the numbers that are in a word of :meth:`word_of`."""
        return {number for bit, number in enumerate(self._mapped) if word >> bit & 1}

    def shrink(self, most_bytes: int, spared: Collection[int] = ()) -> None:
        """Forgets segments until ``most_bytes`` are left, or those that are ``spared``."""
        for number in [each for each in self._mapped if each not in spared]:
            if self.nbytes <= most_bytes:
                break
            self.drop(number)

    def drop(self, number: int) -> None:
        """Forgets a segment. Tensors in it stay."""
        del self._mapped[number]
        self.files.pop(number, None)

    def _create(self, nbytes: int) -> int:
        if len(self._mapped) == _MOST:
            self.drop(next(iter(self._mapped)))
        number, self._next = self._next, self._next + 1
        group = self._group() if self._group is not None else None
        assert (group is None) is (self._group is None)  # whoever streams holds its group
        mapping, file, _ = share(self._what, nbytes, group)
        self._mapped[number] = mapping
        if file is not None:
            self.files[number] = file
        return number


def share(what: str, nbytes: int, group: dist.ProcessGroup | None) -> Shared:
    """Returns new memory that the ranks of ``group`` share, or of this process alone. Collective.

    Raises:
        NoSharedMemory: a rank cannot make or map it.
    """
    rank = 0 if group is None else dist.get_rank(group)
    number, nonce, trouble = 0, "", ""
    mapping, file = None, None
    if rank == 0:
        try:
            file = SharedFile(nbytes)
            number, nonce = file.number, file.nonce
            mapping = Mapping(number, nbytes)
        except Exception as error:
            trouble = line_of(error)
    pids = [os.getpid()]
    if group is not None:
        mine = os.getpid(), number, nonce, trouble
        offers = all_gather_json(f"{what}: memory", mine, group)
        pids = [pid for pid, *_ in offers]
        _, number, nonce, trouble = offers[0]
        if not trouble and rank != 0:
            try:
                with opened(pids[0], number, nonce, nbytes) as descriptor:
                    mapping = Mapping(descriptor, nbytes)
            except Exception as error:
                trouble = f"rank {rank_names(group)[rank]}: {line_of(error)}"
        troubles = all_gather_json(f"{what}: mapping", trouble, group)
        trouble = next(filter(None, troubles), "")
    if trouble or mapping is None:
        raise NoSharedMemory(f"{what}: no {nbytes} bytes of memory to share: {trouble}")
    return Shared(mapping, file, pids)


def kernel_never_overcommits() -> bool:
    """Returns whether a new file takes all of its pages at once."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False
