"""The Python face of the C++ runtime: the ops' fakes, and the log of collectives.

==================================================  ==============================================
``zero3::unshard(placeholder, contract)``           the full tensor; what a sharded module reads
``zero3::all_gather_start(placeholders)``           a handle; what graphs hold, with
``zero3::all_gather_wait(handle, placeholders)``    full tensors and a token
``zero3::all_gather_views(handle, placeholders)``   the same, of memory that the ranks share
``zero3::reduce_grad(grad, placeholder, after)``    takes a full gradient, gives a token
``zero3::reduce_mm(factors, placeholder, after)``   as of the product of two matrices
``zero3::reduce_rows(rows, placeholder, after)``    as of zeros to which values are added at indices
==================================================  ==============================================

A *placeholder* has a parameter's full shape, compute dtype and strides, and zero bytes of storage,
by whose address the runtime knows the parameter.
A *token* is an empty tensor that orders collectives: each takes that of the one before it.
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
        f"({torch.__version__}); build it with: pip install --no-build-isolation -e ."
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

# Nobody reads what reduce_grad returns, and maybe nobody what a gather does, which another rank
# needs and waits for: without this, compilers delete them as dead code.
for _op in (*REDUCTIONS, ops.all_gather_start.default, *WAITS):
    torch.fx.node.has_side_effect(_op)


class CollectiveLog(Sequence[_C.Collective]):
    """The collectives of a ``record_collectives`` block, by when the last part of each started."""

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
    """Records this rank's collectives while the block runs: what is waited for together is one.

    Yields a sequence of records with ``op`` ("all_gather", "reduce_scatter" or "all_reduce"),
    ``dtype`` (on the wire), ``nbytes`` (of the full, unsharded buffer, padding included),
    ``world_size`` (ranks that take part) and ``params`` (the FQNs inside).

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
    """Frees the memory that communication keeps from step to step, and returns its bytes.

    On a CPU it is memory of gathered parameters, of gradients on their way and of those that were
    cleared, at most what :func:`limit_buffers` allows. The next step allocates it again. The end of
    glibc's heap, which a backward keeps from being trimmed (what lies there is freed by others and
    not counted), may be trimmed again too, until the next backward. Elsewhere nothing is kept.
    """
    return _C.release_buffers()


class BufferStats(NamedTuple):
    """Bytes of this process's communication buffers on CPUs, but for small ones.

    Attributes:
        in_use: gathered parameters, gradients on their way, and those that have arrived.
        peak: of ``in_use``, since it was last reset.
        kept: not in use, for the next step.
    """

    in_use: int
    peak: int
    kept: int


def buffer_stats(*, reset_peak: bool = False) -> BufferStats:
    """What communication holds now and at most; ``reset_peak`` begins a new peak after that.

    On other devices torch's allocator counts, as in ``torch.cuda.memory_stats``.
    """
    return BufferStats(*_C.buffer_stats(reset_peak))


def limit_buffers(nbytes: int) -> None:
    """Keeps at most ``nbytes`` bytes of such memory in this process, 512 MiB by default.

    What a step needs beyond that is allocated, and faulted in, again in each.
    """
    if not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"nbytes is an int of at least 0, got {nbytes!r}")
    _C.limit_buffers(nbytes)
