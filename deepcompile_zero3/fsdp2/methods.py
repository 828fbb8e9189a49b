"""FSDP2's methods that have little or no effect here, and those that are refused by name."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.distributed.fsdp import FSDPModule

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import check_bool
from deepcompile_zero3.guides import Guide
from deepcompile_zero3.sharding.group import ParameterGroup
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.torch_internals import dynamo_trace


class _NotForDynamo(property):
    """A property that is false by itself: Dynamo of torch 2.15 takes it off the class unread."""

    def __bool__(self) -> bool:
        return False


class FSDP2Methods(FSDPModule):
    """Makes a module an ``FSDPModule``, for ``isinstance`` and for code that asks for its methods.

    None of the base class's own methods is called: each is replaced here or in ``Zero3Module``.
    """

    _zero3_group: ParameterGroup

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets whether the next backwards of the model step parameters (``step_in_backward``).

        Has no other effect: every backward ends when its reductions have ended.

        Raises:
            ValueError: ``is_last_backward`` is not a bool.
        """
        check_bool("is_last_backward", is_last_backward)
        model = self._zero3_group.model
        if model is not None:
            model.is_last_backward = is_last_backward
            for parameter in model.parameters:
                parameter.deliver_early_if_possible()

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether a gradient that only some ranks have counts as zero on the others.

        On CPUs over gloo it always does. On GPUs, as over NCCL, collectives have one order on all
        ranks: without this setting, ranks with different gradients wait for each other for ever.
        With it, ranks tell each other at the beginning of a backward which gradients they have, and
        the host waits for the answers. Gradients that only some ranks have stay in full, and are
        reduced at the end of the backward. A parameter that no rank uses has no gradient.

        Each rank needs a gradient of the model in the backward, and all ranks run the forwards of
        the modules that ``fully_shard`` was called on. Call it alike on all ranks. A backward
        raises Zero3Error if only some ranks have the gradient of a parameter with
        ``grad_dtype=None`` and no ``reduce_dtype``: the others cannot know the dtype of zeros.

        Args:
            reduce_scatter_unused_params: whether zeros are reduced.
            recurse: whether to include the sharded modules inside this one.

        Raises:
            ValueError: ``reduce_scatter_unused_params`` is not a bool.
        """
        self._zero3_set("reduce_scatter_unused_params", reduce_scatter_unused_params, recurse)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Calls :meth:`set_gradient_divide_factor`, its name in earlier releases of torch."""
        self.set_gradient_divide_factor(factor)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the current stream wait for ``event``, and so the gathers of the next forward.

        Gathers always wait for the current stream. Call it if the optimizer steps on another one.

        Args:
            event: recorded after the optimizer's step.
        """
        event.wait()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Has no effect: an eager backward gathers a group when it first reads a saved tensor."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Has no effect: gradients are always summed over the ranks, and then divided."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Has no effect: reductions always have a process group of their own."""

    def _is_managed(self) -> bool:
        """Tells transformers that ranks must call the module together.

        Dynamo gets False. Given True, it would not trace the module, as it traces none of FSDP1.
        """
        return torch.compiler.is_dynamo_compiling() or not dynamo_trace.is_tracing()

    # transformers sets it to True, which it is anyway.
    _is_fsdp_managed_module = _NotForDynamo(_is_managed, lambda self, managed: None)

    def _get_fsdp_state(self) -> Any:
        """Returns the state that torch's own functions for FSDP modules use."""
        return torch_internals.fsdp_state_of(self)  # type: ignore[arg-type]

    def _zero3_set(self, name: str, value: bool, recurse: bool) -> None:
        """Sets ``name`` in the settings of this module's parameters, and of those inside it."""
        check_bool(name, value)
        for parameter in self._zero3_parameters_below(recurse):
            parameter.settings = parameter.settings.replace(**{name: value})  # type: ignore[arg-type]

    def _zero3_parameters_below(self, recurse: bool) -> Iterator[ShardedParameter]:
        modules = self.modules() if recurse else (self,)  # type: ignore[attr-defined]
        for module in modules:
            if isinstance(module, FSDP2Methods):
                yield from module._zero3_group.parameters


def refused(name: str, why: str) -> Callable[..., NoReturn]:
    """Returns a method that raises NotImplementedError and says ``why``."""

    def method(self: FSDP2Methods, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not supported: {why}. See {Guide.METHODS}")

    method.__name__ = name
    method.__doc__ = f"Raises NotImplementedError, because {why}."
    return method


# Methods of FSDP2 that are refused, each with the reason.
REFUSED = {
    "_set_unshard_async_op": "prefetch with set_modules_to_forward_prefetch",
    "set_allocate_memory_from_process_group_for_comm": "the runtime has buffers of its own",
    "set_custom_all_gather": "the runtime communicates",
    "set_custom_reduce_scatter": "the runtime communicates",
    "set_keep_unsharded_storage": "no CUDA graph captures gathers",
    "set_reduce_scatter_max_input_buffers": "the runtime has buffers of its own",
    "set_symm_mem_for_comm": "the runtime has buffers of its own",
}

for _name, _why in REFUSED.items():
    setattr(FSDP2Methods, _name, refused(_name, _why))
