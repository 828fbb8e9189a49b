"""State behind a sharded module, for torch's functions that bypass its methods.

``torch.distributed.fsdp.register_fsdp_forward_method`` and the schedules of
``torch.distributed.pipelining`` reach past the methods of the module, to the state behind it.
"""

import weakref
from typing import Any, NoReturn

from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.gradients.defer import defer_reduction
from deepcompile_zero3.sharding.group import ParameterGroup


class _NotSupportedError(NotImplementedError, AttributeError):
    """Looks like a missing attribute to ``hasattr``."""


class FsdpState:
    """State of a module that ``fully_shard`` was called on, under the names that torch uses."""

    _fsdp_param_groups = ()  # nothing is left to do for a group after a backward
    _fsdp_param_group = None  # likewise, in torch 2.11

    def __init__(self, module: nn.Module, group: ParameterGroup) -> None:
        self._module: weakref.ref[Any] = weakref.ref(module)  # the module that has this state
        self._group = group
        # Pipelines compare this context to learn whether stages share communication. The runtime's
        # streams are shared anyway, so each state has its own.
        self._comm_ctx = object()

    def _pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Begins a method that torch registered as a forward.

        torch does not end it if the method raises. So this gathers the group and begins no forward:
        gathered weights may stay until the next forward, a begun forward may not.
        """
        self._group.unshard(async_op=False)
        return self._group.casts.inputs(args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        self._group.reshard()
        return self._group.casts.output(output)

    @property
    def _state_ctx(self) -> "FsdpState":
        return self

    @property
    def all_states(self) -> "tuple[FsdpState, ...]":
        """The states whose micro-batches a pipeline's schedule ends with this one's: no others."""
        return (self,)

    def _root_post_backward_final_callback(self) -> None:
        """Reduces the sums of the module's micro-batches, which their backwards have left."""
        module = self._module()
        if module is None:
            raise Zero3Error(
                "a schedule ends the micro-batches of a sharded module that was deleted: keep the "
                "stage's module until the schedule's step has ended"
            )
        if self._group.is_finalized_manually:
            module.finalize_backward()
            return
        with defer_reduction(module):
            pass

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotSupportedError(
            f"{name} of FSDP2's private state is not supported: the runtime communicates"
        )
