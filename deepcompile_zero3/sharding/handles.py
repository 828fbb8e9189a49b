"""Handles that FSDP2's asynchronous methods return."""

from typing import Any

from torch.distributed import fsdp
from torch.distributed.fsdp import UnshardHandle

from deepcompile_zero3.sharding.group import ParameterGroup

_ReductionHandle: Any = getattr(fsdp, "GradientReductionHandle", object)


class GradientReductionHandle(_ReductionHandle):
    """The result of :meth:`Zero3Module.finalize_backward`, as of torch 2.15."""

    def wait(self) -> None:
        """Does nothing: the gradients are there."""


class GatherHandle(UnshardHandle):
    """The result of :meth:`Zero3Module.unshard` with ``async_op=True``."""

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Waits for the gather, if it has not ended."""
        if self._group.is_unsharded_by_user:
            self._group.gather()
