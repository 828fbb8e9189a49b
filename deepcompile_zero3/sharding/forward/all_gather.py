"""Gathers of sharded parameters outside of compiled graphs, and in recomputed forwards."""

from collections.abc import Iterable, Sequence

import torch

from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.parameter import ShardedParameter


class AllGather:
    """A gather that has started, from the shards as they are now.

    It has one collective for each process group and dtype of ``parameters``.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters = tuple(parameters)
        for parameter in parameters:
            parameter.refresh()
        self._metadata = {
            p: p.substitute.take(p.registered.local) for p in parameters if p.substitute is not None
        }
        self._gather = _C.Gather([source.handle for p in parameters for source in p.sources])

    def snapshot(self) -> None:
        """Lets the shards change before ``wait``, which still returns their present values."""
        self._gather.snapshot()

    def start_again_if_lost(self) -> None:
        """Gathers again if later gathers needed the memory that ranks share. All ranks call it."""
        self._gather.start_again_if_lost()

    def wait(self) -> dict[ShardedParameter, torch.Tensor]:
        """Waits, and returns the full tensors, [rows, ...] each in its compute dtype."""
        gathered = iter(self._gather.finish(fresh=True))
        fulls = {}
        for parameter in self.parameters:
            parts = [next(gathered) for _ in parameter.sources]
            substitute, metadata = parameter.substitute, self._metadata.get(parameter)
            fulls[parameter] = parts[0] if substitute is None else substitute.full(parts, metadata)
        return fulls


def gather_one(parameter: ShardedParameter) -> torch.Tensor:
    """Returns the full tensor of a parameter that is not gathered. Differentiable."""
    if parameter.substitute is None:
        return _C.gather_and_read(parameter.handle)
    return _C.read_as(parameter.handle, AllGather([parameter]).wait()[parameter])


def republish_if_recomputing(parameters: Iterable[ShardedParameter]) -> None:
    """Makes ranks publish ``parameters`` again if a backward recomputes a forward.

    The copies that they share may be of another forward. Has no effect on ranks that exchange
    messages.
    """
    if _C.in_backward():
        _C.invalidate([parameter.handle for parameter in parameters])
