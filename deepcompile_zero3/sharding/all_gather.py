"""Gathers of sharded parameters outside of compiled graphs, and in recomputed forwards."""

from collections.abc import Iterable, Sequence

import torch

from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.parameter import ShardedParameter


class AllGather:
    """A gather that has started, from the shards as they are now.

    It has one collective for each process group and dtype among those of ``parameters`` that are
    not held already.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters = tuple(parameters)
        for parameter in parameters:
            parameter.refresh()
        self._gather = _C.Gather([parameter.handle for parameter in parameters])

    def snapshot(self) -> None:
        """Lets the shards change before ``wait``, which returns their values from before."""
        self._gather.snapshot()

    def wait(self) -> dict[ShardedParameter, torch.Tensor]:
        """Waits, and returns the full tensors, [rows, ...] each in its compute dtype."""
        return dict(zip(self.parameters, self._gather.finish(fresh=True), strict=True))


def republish_if_recomputing(parameters: Iterable[ShardedParameter]) -> None:
    """Makes ranks that share memory write ``parameters`` again if a backward recomputes a forward.

    The shared copies may be those of another forward. Has no effect on ranks that exchange
    messages.
    """
    if _C.in_backward():
        _C.invalidate([parameter.handle for parameter in parameters])
