"""Python interface of the C++ runtime: fake kernels of its ops, and the log of collectives.

========================================================  ========================================
``zero3::unshard(placeholder, contract)``                 returns the full tensor
``zero3::all_gather_start(placeholders, after)``          starts a gather, returns a handle
``zero3::all_gather_wait(handle, placeholders, after)``   returns full tensors and a token
``zero3::all_gather_views(handle, placeholders, after)``  likewise, as views that no graph owns
``zero3::reduce_grad(grad, placeholder, after, ...)``     takes a full gradient, returns a token
``zero3::reduce_mm(factors, placeholder, after, ...)``    takes a gradient as factors of a product
``zero3::reduce_rows(rows, placeholder, after, ...)``     takes a gradient as indices and values
========================================================  ========================================

Rewritten graphs contain gathers and reductions in place of ``unshard``. The gradient of
``reduce_rows`` is zeros to which the values are added at the indices.

A *placeholder* has the full shape, compute dtype and strides of a parameter, and zero bytes of
storage. The runtime finds the parameter by the address of that storage. A *token* is an empty
tensor. An op that starts or waits for a collective takes the handle or token of the one before it
as ``after``, so that no scheduler swaps two. Reductions also take ``use`` and ``contract``:
*contract* is the leaf's dtype as text; *use* tells equal gradients of two uses apart.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from deepcompile_zero3.errors import Zero3Error

try:
    from deepcompile_zero3 import _C
except ImportError as error:
    raise ImportError(
        "the C++ runtime deepcompile_zero3._C is not built for this Python and torch "
        f"({torch.__version__}), in {__file__.rsplit('/', 2)[0]}; build it there with: pip install "
        "--no-build-isolation -e . (or, if it is installed elsewhere, run outside of this folder)"
    ) from error

_C.set_error(Zero3Error)

Collective: TypeAlias = _C.Collective
ops = torch.ops.zero3


@torch.library.register_fake("zero3::unshard")
def _(placeholder: torch.Tensor, contract: str) -> torch.Tensor:
    return torch.empty_like(placeholder)


@torch.library.register_fake("zero3::all_gather_start")
def _(placeholders: Sequence[torch.Tensor], after: torch.Tensor | None = None) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.register_fake("zero3::all_gather_wait")
def _(
    handle: torch.Tensor, placeholders: Sequence[torch.Tensor], after: torch.Tensor | None = None
) -> list[torch.Tensor]:
    return [*(torch.empty_like(p) for p in placeholders), placeholders[0].new_empty(0)]


@torch.library.register_fake("zero3::all_gather_views")
def _(
    handle: torch.Tensor, placeholders: Sequence[torch.Tensor], after: torch.Tensor | None = None
) -> list[torch.Tensor]:
    return [*placeholders, placeholders[0].new_empty(0)]


@torch.library.register_fake("zero3::reduce_grad")
def _(
    grad: torch.Tensor,
    placeholder: torch.Tensor,
    after: torch.Tensor | None = None,
    use: int = 0,
    contract: str = "",
) -> torch.Tensor:
    return grad.new_empty(0)


@torch.library.register_fake("zero3::reduce_mm")
@torch.library.register_fake("zero3::reduce_rows")
def _(
    inputs: Sequence[torch.Tensor],
    placeholder: torch.Tensor,
    after: torch.Tensor | None = None,
    use: int = 0,
    contract: str = "",
) -> torch.Tensor:
    return inputs[-1].new_empty(0)


REDUCTIONS = (ops.reduce_grad.default, ops.reduce_mm.default, ops.reduce_rows.default)

WAITS = (ops.all_gather_wait.default, ops.all_gather_views.default)

# Without this, compilers delete these ops as dead code. Nothing reads the result of a reduction.
# Perhaps nothing reads that of a gather either, while another rank needs the gather and waits.
for _op in (*REDUCTIONS, ops.all_gather_start.default, *WAITS):
    torch.fx.node.has_side_effect(_op)


class CollectiveLog(Sequence[_C.Collective]):
    """Collectives of a ``record_collectives`` block, ordered by the start of their last parts."""

    def __init__(self) -> None:
        self._log = _C.CollectiveLog.start()

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._log.records()[index]

    def __len__(self) -> int:
        return len(self._log.records())

    def __iter__(self) -> Iterator[_C.Collective]:
        return iter(self._log.records())


@contextlib.contextmanager
def record_collectives() -> Iterator[CollectiveLog]:
    """Records this rank's collectives while the block runs.

    Parts that are waited for together count as one collective.

    Yields:
        A sequence of records with the attributes ``op`` ("all_gather", "reduce_scatter" or
        "all_reduce"), ``dtype`` (on the wire), ``nbytes`` (size in bytes of the full, unsharded
        buffer, padding included), ``world_size`` (number of ranks that take part) and ``params``
        (FQNs of the parameters).

    Example::

        with record_collectives() as log:
            model(x).sum().backward()
        gathered = sum(c.nbytes for c in log if c.op == "all_gather")
    """
    log = CollectiveLog()
    try:
        yield log
    finally:
        log._log.stop()


def release_buffers() -> int:
    """Frees the communication buffers that are kept from step to step.

    On a CPU these are buffers of gathered parameters, of gradients in flight and of cleared
    gradients, at most as many bytes as :func:`limit_buffers` allows. The next step allocates them
    again. On other devices nothing is kept.

    A backward also keeps glibc from trimming the end of its heap. After this call the heap may be
    trimmed again, until the next backward. What lies there is freed by others and not counted.

    Returns:
        The size of the freed buffers in bytes.
    """
    return _C.release_buffers()


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
