"""Memory that the ranks of one host share, and use again once nobody has tensors in it.

A segment is an anonymous file (``memfd_create``), as in ``transport/one_host.py``: it has no name
that could be left behind, and vanishes with the last process that maps it.
"""

import mmap
import os
import secrets
import weakref
from pathlib import Path

import torch.distributed as dist

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.transport.json_collectives import all_gather_json
from deepcompile_zero3.transport.on_all_ranks import line_of

_NONCE_BYTES = 16


class Mapping:
    """A segment as one process has mapped it.

    Attributes:
        nbytes: its size.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self.nbytes = nbytes
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


class Segments:
    """The segments of a stream, the same on all ranks.

    Attributes:
        files: on the first rank, the descriptor of each segment.
    """

    def __init__(self, what: str, group: dist.ProcessGroup | None) -> None:
        """Args:
        what: name of the call, for messages.
        group: ranks that share the segments, or None for this process alone.
        """
        self._what = what
        self._group = group
        self._mapped: dict[int, Mapping] = {}
        self._next = 0
        self.files: dict[int, int] = {}

    def take(self, nbytes: int, held: set[int]) -> int:
        """Returns the number of a segment that nobody uses. Collective if there is none.

        Args:
            nbytes: its size.
            held: segments in which a process has tensors, or a bucket is; the same on all ranks.

        Raises:
            Zero3Error: a rank cannot make or map a new segment.
        """
        free = [number for number in self._mapped if number not in held]
        fitting = [number for number in free if self._mapped[number].nbytes == nbytes]
        for number in free:
            if number not in fitting[:1]:
                self._drop(number)
        return fitting[0] if fitting else self._create(nbytes)

    def __getitem__(self, number: int) -> Mapping:
        return self._mapped[number]

    @property
    def held(self) -> set[int]:
        """Segments in which this process has tensors."""
        return {number for number, mapping in self._mapped.items() if mapping.is_held}

    def close(self) -> None:
        """Forgets all segments. Tensors in them stay."""
        for number in list(self._mapped):
            self._drop(number)

    def _drop(self, number: int) -> None:
        del self._mapped[number]
        if number in self.files:
            os.close(self.files.pop(number))

    def _create(self, nbytes: int) -> int:
        number, self._next = self._next, self._next + 1
        is_first = self._group is None or dist.get_rank(self._group) == 0
        offer, trouble = (0, 0, ""), ""
        if is_first:
            try:
                nonce = secrets.token_hex(_NONCE_BYTES // 2)
                file = _C.new_shared_file(nbytes + _NONCE_BYTES)
                self.files[number] = file
                os.pwrite(file, nonce.encode(), nbytes)
                self._mapped[number] = Mapping(file, nbytes)
                offer = os.getpid(), file, nonce
            except Exception as error:
                trouble = line_of(error)
        if self._group is not None:
            offers = all_gather_json(f"{self._what}: memory", [offer, trouble], self._group)
            offer, trouble = offers[0]
            if not trouble and not is_first:
                try:
                    self._mapped[number] = _open(offer[0], offer[1], offer[2], nbytes)
                except Exception as error:
                    trouble = f"rank {dist.get_rank(self._group)}: {line_of(error)}"
            troubles = all_gather_json(f"{self._what}: mapping", trouble, self._group)
            trouble = next(filter(None, troubles), "")
        if trouble:
            raise Zero3Error(f"{self._what}: no {nbytes} bytes of memory to share: {trouble}")
        return number


def _open(pid: int, file: int, nonce: str, nbytes: int) -> Mapping:
    path = f"/proc/{pid}/fd/{file}"
    opened = os.open(path, os.O_RDWR)
    try:
        if os.pread(opened, _NONCE_BYTES, nbytes) != nonce.encode():
            raise OSError(f"{path} is not the file that rank 0 has made")
        return Mapping(opened, nbytes)
    finally:
        os.close(opened)


def host_of_this_process() -> str:
    """Returns text that is equal in processes that can open each other's files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
