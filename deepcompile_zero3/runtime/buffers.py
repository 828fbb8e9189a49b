"""Communication buffers that are kept from step to step: their sizes, limit and release."""

from collections.abc import Callable
from typing import NamedTuple

from deepcompile_zero3.runtime.load import _C

# Functions of features that free what they keep, and return its size in bytes.
RELEASES: list[Callable[[], int]] = []


def release_buffers() -> int:
    """Frees the communication buffers that are kept from step to step.

    On a CPU these are buffers of gathered parameters, of gradients in flight and of cleared
    gradients, at most as many bytes as :func:`limit_buffers` allows. The next step allocates them
    again. On other devices no buffers stay. Features free what they keep too, such as the memory
    of ``stream_full_parameters``.

    A backward also keeps glibc from trimming the end of its heap. This call lets glibc trim the
    heap until the next backward. The result does not count memory of the heap.

    Returns:
        The size of the freed buffers in bytes.
    """
    return _C.release_buffers() + sum(release() for release in RELEASES)


class BufferStats(NamedTuple):
    """Bytes of this process's communication buffers on CPUs, except small ones.

    Attributes:
        in_use: bytes of gathered parameters, gradients in flight, and gradients that have arrived.
        peak: maximum of ``in_use`` since it was last reset.
        kept: bytes that are not in use and are kept for the next step.
    """

    in_use: int
    peak: int
    kept: int


def buffer_stats(*, reset_peak: bool = False) -> BufferStats:
    """Returns the bytes of communication buffers that are in use, in use at the peak, and kept.

    Buffers on other devices are counted by torch's allocator, as in ``torch.cuda.memory_stats``.

    Args:
        reset_peak: whether a new peak begins after this call.
    """
    return BufferStats(*_C.buffer_stats(reset_peak))


def limit_buffers(nbytes: int) -> None:
    """Sets the maximum size of the communication buffers that this process keeps.

    The default is 512 MiB. Memory that a step needs beyond the limit is allocated, and faulted in,
    again in each step.

    Args:
        nbytes: the limit in bytes, at least 0.

    Raises:
        ValueError: ``nbytes`` is not an int of at least 0.
    """
    if not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"nbytes is an int of at least 0, got {nbytes!r}")
    _C.limit_buffers(nbytes)
