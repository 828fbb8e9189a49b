"""The log of collectives: ``record_collectives``."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from deepcompile_zero3.runtime.load import _C

Collective: TypeAlias = _C.Collective


class CollectiveLog(Sequence[Collective]):
    """Collectives of a ``record_collectives`` block, ordered by the start of their last parts."""

    def __init__(self) -> None:
        self._log = _C.CollectiveLog.start()

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._log.records()[index]

    def __len__(self) -> int:
        return len(self._log.records())

    def __iter__(self) -> Iterator[Collective]:
        return iter(self._log.records())


@contextlib.contextmanager
def record_collectives() -> Iterator[CollectiveLog]:
    """Records this rank's collectives while the block runs.

    Parts that are waited for together count as one collective.

    Yields:
        A sequence of records with the attributes ``op`` ("all_gather", "reduce_scatter" or
        "all_reduce"), ``dtype`` (on the wire), ``nbytes`` (size in bytes of the full buffer,
        padding included), ``world_size`` (number of ranks that take part) and ``params``
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
