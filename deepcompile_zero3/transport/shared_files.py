"""Anonymous files (``memfd_create``) that processes of one host open for shared memory.

They have no name that could be left behind, vanish with the last process that maps them, and are
not bounded by ``/dev/shm``. Processes of one user that can see each other open them through
``/proc``.
"""

import functools
import hashlib
import os
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepcompile_zero3.runtime import _C

_NONCE_BYTES = 16


class SharedFile:
    """A file of zeros that this process has made, and closes with this object.

    Attributes:
        number: its descriptor.
        nonce: text behind the zeros, by which others know that it is this file.
    """

    def __init__(self, nbytes: int) -> None:
        """Args:
        nbytes: how many zeros it has.
        """
        self.nonce = secrets.token_hex(_NONCE_BYTES // 2)
        self.number = _C.new_shared_file(nbytes + _NONCE_BYTES)
        self._close = weakref.finalize(self, os.close, self.number)
        self._close.atexit = False
        os.pwrite(self.number, self.nonce.encode(), nbytes)

    def close(self) -> None:
        """Closes it now. Memory that is mapped stays."""
        self._close()


@contextmanager
def opened(pid: int, number: int, nonce: str, nbytes: int) -> Iterator[int]:
    """Opens a :class:`SharedFile` of the process ``pid``, and yields a descriptor.

    Raises:
        OSError: it cannot be opened, or is another file.
    """
    path = f"/proc/{pid}/fd/{number}"
    file = os.open(path, os.O_RDWR)
    try:
        if os.pread(file, _NONCE_BYTES, nbytes) != nonce.encode():
            raise OSError(f"{path} is not the file that process {pid} has made")
        yield file
    finally:
        os.close(file)


def host_of_this_process() -> str:
    """Returns text that is equal in processes that can share memory.

    They share a kernel, a PID namespace and a user, and so can open each other's files. They have
    one build of the runtime, and so agree on what is in them.

    Raises:
        OSError: these cannot be read.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()} {_build()}"


@functools.cache
def _build() -> str:
    """Returns a digest of the runtime's binary."""
    return hashlib.sha256(Path(_C.__file__).read_bytes()).hexdigest()
