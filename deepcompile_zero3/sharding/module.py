"""``Zero3Module``: the methods that ``fully_shard`` adds to the module it is called on."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error, check_bool
from deepcompile_zero3.fsdp2.methods import FSDP2Methods, refused
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.conversion import convert
from deepcompile_zero3.sharding.forward.reads import marks_forward
from deepcompile_zero3.sharding.gradients.defer import reduce_deferred
from deepcompile_zero3.sharding.gradients.sink import refuse_if_taken
from deepcompile_zero3.sharding.group import ParameterGroup
from deepcompile_zero3.sharding.handles import GatherHandle, GradientReductionHandle
from deepcompile_zero3.sharding.module_parameters import registered_in
from deepcompile_zero3.sharding.parameter import ShardedParameter


class Zero3Module(FSDP2Methods):
    """The methods that ``fully_shard`` adds to the module it is called on."""

    _zero3_may_skip_call: bool  # whether the module's class has the __call__ of nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, as ``nn.Module.__call__`` does.

        Dynamo skips frames of torch's own files. It enters through this frame, and so traces
        ``forward``, with the hooks around it, into the same graph.
        """
        return self._call(*args, **kwargs)

    @marks_forward
    @torch_internals.inline_only  # a forward with a graph break ends here, in eager
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if not self._zero3_may_skip_call or torch_internals.has_hooks_of_others(self):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
            # Casts in place of the group's hooks, which take Dynamo long to trace.
            args, kwargs = self._zero3_group.casts.inputs(args, kwargs)
            output = self.forward(*args, **kwargs)  # type: ignore[attr-defined]
            return self._zero3_group.casts.output(output)
        if _C.handles_signals():  # before the hooks, which would end the forward that waits
            raise Zero3Error(
                "a signal handler cannot run a sharded module while this rank waits for others: "
                "set a flag, and act between steps"
            )
        depth = self._zero3_group.depth
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Exception:
            raise
        except BaseException:
            self._zero3_group.abort_forward(depth)
            raise

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Converts or moves the module: torch calls this for ``to``, ``bfloat16``, ``to_empty``."""
        apply = super(FSDPModule, self)._apply  # type: ignore[misc]
        below = registered_in(cast(nn.Module, self))
        return convert(self._zero3_group, below, lambda: apply(fn, recurse=recurse))

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module's group, for use outside a forward.

        Not recursive. The parameters stay unsharded until :meth:`reshard` or the end of the next
        forward that uses them. Gradients that flow into them are reduced as in a forward.

        Args:
            async_op: True only starts the gather and returns a handle, whose ``wait()`` waits for
                it. The first read of one of the parameters and a compiled forward wait too. All
                ranks wait, or none.

        Returns:
            A handle with a ``wait()`` method if ``async_op`` is True, else None.
        """
        self._zero3_group.unshard(async_op)
        return GatherHandle(self._zero3_group) if async_op else None

    def reshard(self) -> None:
        """Frees the gathered parameters of this module's group. Not recursive.

        Raises:
            Zero3Error: a gathered parameter was modified in place, which is lost.
        """
        self._zero3_group.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backwards from now on reduce gradients, or accumulate them unreduced.

        Without sync, each rank keeps the full gradients, and ``.grad`` stays as it was. The first
        backward with sync reduces their sum. This costs memory for the full model's gradients. It
        also calls :meth:`set_requires_all_reduce`.

        Args:
            requires_gradient_sync: whether to reduce gradients.
            recurse: whether to include the sharded modules inside this one.

        Raises:
            ValueError: ``requires_gradient_sync`` is not a bool.
        """
        self._zero3_set("requires_gradient_sync", requires_gradient_sync, recurse)
        self.set_requires_all_reduce(requires_gradient_sync, recurse=recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether backward gathers again (True), or forward keeps what it gathered (False).

        A compiled model recompiles when this changes.

        Args:
            reshard_after_forward: whether to reshard after forward.
            recurse: whether to include the sharded modules inside this one.

        Raises:
            ValueError: ``reshard_after_forward`` is not a bool.
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        for parameter in self._zero3_parameters_below(recurse):
            parameter.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backwards from now on free gathered parameters.

        If False, the next forwards and backwards use the parameters that are still gathered, and
        gather nothing again. Use it for micro-batches without an optimizer step between them, and
        set it to True before the backward of the last one. It costs memory for the full model. With
        ``reshard_after_forward=True`` each backward gathers once; otherwise only the first forward
        gathers.

        Args:
            reshard_after_backward: whether to reshard after backward.
            recurse: whether to include the sharded modules inside this one.

        Raises:
            ValueError: ``reshard_after_backward`` is not a bool.
            Zero3Error: raised by the next forward if a parameter was changed in place while it was
                gathered. Changes through ``.data`` are not noticed.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        for parameter in self._zero3_parameters_below(recurse):
            parameter.settings = parameter.settings.replace(
                reshard_after_backward=reshard_after_backward
            )
            if reshard_after_backward and not parameter.placeholder.requires_grad:
                parameter.handle.reshard_retained()  # no backward brings it a gradient

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets the number that the sum of each gradient over the ranks is divided by.

        It replaces the number of ranks for this module's group: 1.0 gives the sum. Not recursive.

        Args:
            factor: the divisor.

        Raises:
            ValueError: ``factor`` is not a positive finite number.
        """
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not 0 < factor < float("inf"):
            raise ValueError(f"factor must be a positive finite number, got {factor!r}")
        for parameter in self._zero3_group.parameters:
            parameter.settings = parameter.settings.replace(divide_factor=factor)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the modules that an eager forward prefetches after this module.

        Once an eager forward has gathered this module's group, it starts to gather the groups of
        ``modules``, on all ranks. From the second step on, eager code prefetches by itself in the
        order of the step before. Compiled forwards always do.

        Args:
            modules: sharded modules.

        Raises:
            ValueError: a module is not sharded.
        """
        self._zero3_group.forward_prefetch[:] = weak_groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the modules that an eager backward prefetches after this module.

        The backward must come to ``modules`` too. See :meth:`set_modules_to_forward_prefetch`.
        """
        self._zero3_group.backward_prefetch[:] = weak_groups_of(modules)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Sets whether :meth:`finalize_backward` reduces gradients, in place of each backward.

        For schedules in which the reduction is a step of its own. Until then, each rank keeps the
        sums of full gradients. Only for the outermost sharded module.

        Args:
            enabled: whether the caller finalizes.

        Raises:
            ValueError: ``enabled`` is not a bool.
            Zero3Error: this module lies inside another sharded one, or gradients of it wait for
                their reduction.
        """
        check_bool("enabled", enabled)
        group, parameters = self._zero3_outermost("set_manual_backward_finalization")
        if enabled == group.is_finalized_manually:
            return
        waiting = [
            p.fqn for p in parameters if p.settings.deferred is enabled or p.handle.has_gradients()
        ]
        if waiting:
            raise Zero3Error(
                "set_manual_backward_finalization cannot change while gradients wait for their "
                f"reduction, such as those of {waiting[0]!r}: end that, or call reset_iter_state()"
            )
        group.is_finalized_manually = enabled
        for parameter in parameters:
            parameter.settings = parameter.settings.replace(deferred=enabled)
            parameter.handle.take_dropped()

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduces the gradients of all backwards since the last call. Collective.

        Needs :meth:`set_manual_backward_finalization`. Parameters without gradient sync keep their
        sums. Has no effect before the first forward.

        Args:
            async_op: whether to return a handle.

        Returns:
            A handle if ``async_op`` is True, else None. The reduction has ended already, and
            ``wait()`` has nothing to wait for.

        Raises:
            Zero3Error: manual finalization is not enabled, a backward has raised since the last
                call (on all ranks, or the others wait here), or ranks disagree on what is reduced.
        """
        group, parameters = self._zero3_outermost("finalize_backward")
        if not group.is_finalized_manually:
            raise Zero3Error(
                "finalize_backward needs set_manual_backward_finalization(True) before the forward"
            )
        if any(parameter.has_run for parameter in parameters):
            try:
                reduce_deferred(parameters, "finalize_backward: a backward")
            finally:
                for parameter in parameters:
                    parameter.settings = parameter.settings.replace(deferred=True)
        return GradientReductionHandle() if async_op else None

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backwards from now on all-reduce gradients over the replicas of a 2-D mesh.

        If False, each replica accumulates its reduced gradients, and ``.grad`` stays as it was. The
        first backward that all-reduces includes all of them. Has no effect on a 1-D mesh.

        Args:
            requires_all_reduce: whether to all-reduce.
            recurse: whether to include the sharded modules inside this one.

        Raises:
            ValueError: ``requires_all_reduce`` is not a bool.
        """
        self._zero3_set("requires_all_reduce", requires_all_reduce, recurse)

    def set_requires_gradient_on_all_ranks(
        self, requires_gradient_on_all_ranks: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether a gradient that only some ranks have is an error.

        If True, a backward raises where some ranks have a gradient of a parameter and others have
        none. If False, the default, a missing gradient counts as zero: for example, that of an
        expert without tokens. The ranks exchange which gradients they have at the beginning of each
        backward; on GPUs only with this setting or :meth:`set_reduce_scatter_unused_params`.

        Args:
            requires_gradient_on_all_ranks: whether to raise.
            recurse: whether to include the sharded modules inside this one.

        Raises:
            ValueError: ``requires_gradient_on_all_ranks`` is not a bool.
        """
        self._zero3_set("requires_gradient_on_all_ranks", requires_gradient_on_all_ranks, recurse)

    def reset_iter_state(self) -> None:
        """Gives up a sequence of micro-batches, for example after a forward or backward has raised.

        Drops the gradients of this module and of those inside it that are not reduced yet, and
        frees gathered parameters. Call it after an interruption too. All ranks call it, outside
        forwards.
        """
        for parameter in self._zero3_parameters_below(recurse=True):
            parameter.handle.drop_gradients()
            if parameter.settings.deferred:
                parameter.handle.take_dropped()  # else the deferred reduction would raise
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, Zero3Module):
                module._zero3_group.abort_forward()

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Sets a function that changes this group's reduced gradients before they reach ``.grad``.

        For reductions of your own, such as over more replicas. At the end of each backward that
        reduces, the function gets one flat tensor for each dtype of ``.grad``: this rank's shards,
        reduced and divided, over replicas too. It changes them in place. Not recursive.

        Args:
            hook: the function, called on all ranks in the order of groups in the model.
            stream: has no effect: the function runs on the current stream.

        Raises:
            TypeError: ``hook`` is not a function.
            ValueError: ``stream`` is given on a 2-D mesh.
            Zero3Error: a backward steps a parameter of the group, see :func:`step_in_backward`.
        """
        if not callable(hook):
            raise TypeError(f"hook is a function of a tensor, got {hook!r}")
        replicated = any(p.layout.ranks.replicate_group for p in self._zero3_group.parameters)
        if stream is not None and replicated:
            raise ValueError("stream cannot be given on a mesh with replicas")
        for parameter in self._zero3_group.parameters:
            refuse_if_taken(parameter.shard, "set_all_reduce_hook")
        self._zero3_group.all_reduce_hook = hook

    def _zero3_outermost(self, caller: str) -> tuple[ParameterGroup, list[ShardedParameter]]:
        if self._zero3_group.parent is not None:
            raise Zero3Error(
                f"{caller} was called on a {type(self).__name__} that lies inside another sharded "
                "module: call it on the outermost one"
            )
        return self._zero3_group, list(self._zero3_parameters_below(recurse=True))


for _name, _method in vars(FSDPModule).items():
    if not _name.startswith("__") and getattr(Zero3Module, _name) is _method:
        # Only a torch newer than this file has it. The inherited method would fail obscurely.
        setattr(Zero3Module, _name, refused(_name, "not there yet"))


def is_sharded_by_torch(module: object) -> bool:
    """Returns whether torch's ``fully_shard`` was called on ``module``, and not this library's."""
    return isinstance(module, FSDPModule) and not isinstance(module, Zero3Module)


def weak_groups_of(modules: Iterable[Any]) -> list[weakref.ref[ParameterGroup]]:
    """Returns the groups of ``modules``. Raises ValueError if one of them is not sharded."""
    modules = list(modules)
    for module in modules:
        if not isinstance(module, Zero3Module):
            raise ValueError(f"{type(module).__name__} was not sharded: call fully_shard on it")
    return [weakref.ref(module._zero3_group) for module in modules]


def groups_in(module: nn.Module) -> list[ParameterGroup]:
    """Returns the groups of ``module`` and of all modules in it, each once."""
    groups = (m._zero3_group for m in module.modules() if isinstance(m, Zero3Module))
    return list(dict.fromkeys(groups))
