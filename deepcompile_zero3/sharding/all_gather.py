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
            parameter.prepare_sources()
        self._gather = _C.Gather([source for p in parameters for source in _sources(p)])

    def snapshot(self) -> None:
        """Lets the shards change before ``wait``, which returns their values from before."""
        self._gather.snapshot()

    def wait(self) -> dict[ShardedParameter, torch.Tensor]:
        """Waits, and returns the full tensors, [rows, ...] each in its compute dtype."""
        gathered = iter(self._gather.finish(fresh=True))
        return {p: _full_of(p, [next(gathered) for _ in _sources(p)]) for p in self.parameters}


def _sources(parameter: ShardedParameter) -> list[_C.Parameter]:
    """Returns the runtime's parameters that are gathered for ``parameter``."""
    if parameter.extension is None:
        return [parameter.handle]
    return [payload.handle for payload in parameter.extension.payloads]


def _full_of(parameter: ShardedParameter, gathered: list[torch.Tensor]) -> torch.Tensor:
    """Returns the full tensor of what the sources of ``parameter`` were gathered to."""
    return gathered[0] if parameter.extension is None else parameter.extension.full(gathered)


def gather_one(parameter: ShardedParameter) -> torch.Tensor:
    """Returns the full tensor of a parameter that is not gathered. Differentiable."""
    if parameter.extension is None:
        return _C.gather_and_read(parameter.handle)
    return _C.read_as(parameter.handle, AllGather([parameter]).wait()[parameter])


def republish_if_recomputing(parameters: Iterable[ShardedParameter]) -> None:
    """Makes ranks that share memory write ``parameters`` again if a backward recomputes a forward.

    The shared copies may be those of another forward. Has no effect on ranks that exchange
    messages.
    """
    if _C.in_backward():
        _C.invalidate([parameter.handle for parameter in parameters])
