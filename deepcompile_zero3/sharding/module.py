"""The class swap: how ``layer.weight`` becomes something that a compiler can rewrite.

A module whose parameters are sharded gets a subclass of its class (``Linear`` -> ``Zero3Linear``)
with a property for each parameter. Traced, the property is one op, ``zero3.unshard``; in eager it
asks the parameter's group. ``module._parameters`` keeps the DTensors, so that ``parameters()``,
``state_dict()`` and optimizers see nothing else.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import UnshardHandle
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.sharding.group import ParameterGroup
from deepcompile_zero3.sharding.parameter import ShardedParameter, settle


class Zero3Module:
    """What ``fully_shard`` adds to the module it was called on."""

    _zero3_group: ParameterGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module``'s. Dynamo skips frames of torch's own files: entering through this one,
        it traces the hooks around ``forward`` into the same graph.
        """
        return self._call(*args, **kwargs)

    @torch_internals.inline_only  # a forward whose graph breaks ends in here, for real
    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        depth = self._zero3_group.depth
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Exception:
            raise
        except BaseException:
            self._zero3_group.interrupted(depth)
            raise

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module's group, for use outside of a forward.

        Not recursive. They stay whole until :meth:`reshard` or the end of the next forward that
        uses them; gradients that flow into them are reduced as in a forward.

        Args:
            async_op: True only starts, and returns a handle whose ``wait()`` waits. So do the first
                read of one of the parameters, and a compiled forward. All ranks wait, or none.
        """
        self._zero3_group.unshard(async_op)
        return _UnshardHandle(self._zero3_group) if async_op else None

    def reshard(self) -> None:
        """Frees the gathered parameters of this module's group. Not recursive."""
        self._zero3_group.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards from now on reduce gradients, or accumulate them unreduced.

        Without sync the full gradients stay on each rank, and ``.grad`` as it was; the first
        backward with sync reduces their sum. Costs the full model's gradients in memory.
        """
        for parameter in self._zero3_parameters_below(recurse):
            parameter.handle.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether backward gathers again (True), or forward keeps what it gathered (False).

        A compiled model recompiles when this changes.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward is a bool, got {reshard_after_forward!r}")
        for parameter in self._zero3_parameters_below(recurse):
            parameter.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards from now on free what is gathered (True), or leave it to the forwards
        and backwards after them (False), which then gather nothing that is still there.

        For micro-batches between which no optimizer steps: set it to True before the last one's
        backward. Costs the full model in memory. With ``reshard_after_forward=True`` each backward
        gathers once; otherwise, only the first forward.

        Raises:
            ValueError: no bool. And the next forward raises a Zero3Error if a parameter was changed
                in place while its full tensor was held; changes through ``.data`` are not noticed.
        """
        if not isinstance(reshard_after_backward, bool):
            raise ValueError(f"reshard_after_backward is a bool, got {reshard_after_backward!r}")
        for parameter in self._zero3_parameters_below(recurse):
            parameter.handle.reshard_after_backward = reshard_after_backward
            if reshard_after_backward and not parameter.placeholder.requires_grad:
                parameter.handle.let_go_of_held()  # no backward brings it a gradient

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the ranks' sum of each gradient of this module's group by ``factor``, in place of
        the number of ranks: 1.0 gives the sum. Not recursive.

        Raises:
            ValueError: ``factor`` is no positive finite number.
        """
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise ValueError(f"factor is a number, got {factor!r}")
        if not 0 < factor < float("inf"):
            raise ValueError(f"factor is positive and finite, got {factor!r}")
        for parameter in self._zero3_group.parameters:
            parameter.handle.divide_factor = factor

    def set_modules_to_forward_prefetch(self, modules: list["Zero3Module"]) -> None:
        """Lets an eager forward, once it has gathered this module's group, begin to gather those of
        ``modules``, on all ranks. A compiled forward begins by itself, a bucket ahead.
        """
        self._zero3_group.forward_prefetch[:] = _groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list["Zero3Module"]) -> None:
        """As :meth:`set_modules_to_forward_prefetch`, in an eager backward, which must come to
        ``modules`` too.
        """
        self._zero3_group.backward_prefetch[:] = _groups_of(modules)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Changes nothing: every backward ends when its reductions have."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards from now on sum reduced gradients over the replicas of a mesh of two
        dimensions, or add them up on each: ``.grad`` then stays as it was, and the first backward
        that sums does so with all of them. Nothing changes on a mesh of one dimension.
        """
        for parameter in self._zero3_parameters_below(recurse):
            parameter.handle.requires_all_reduce = requires_all_reduce

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Changes nothing: a parameter that only some ranks use has a zero gradient on the others
        always (:meth:`set_requires_gradient_on_all_ranks`), and one that none uses has none.
        """

    def set_requires_gradient_on_all_ranks(
        self, requires_gradient_on_all_ranks: bool, *, recurse: bool = True
    ) -> None:
        """Whether a backward raises where some ranks have a gradient of a parameter and others have
        none (True), or counts it as zero there (False, the default): an expert without tokens, say.
        The ranks tell each other at the beginning of each backward.
        """
        for parameter in self._zero3_parameters_below(recurse):
            parameter.handle.requires_gradient_on_all_ranks = requires_gradient_on_all_ranks

    def reset_iter_state(self) -> None:
        """Gives up a sequence of micro-batches, after a forward or backward has raised or was
        interrupted, say: drops the gradients of this module and those in it that are not reduced
        yet, and frees what is gathered. All ranks call it, outside of forwards.
        """
        for parameter in self._zero3_parameters_below(recurse=True):
            parameter.handle.drop_accumulated()
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, Zero3Module):
                module._zero3_group.give_up()

    def _zero3_parameters_below(self, recurse: bool) -> Iterator[ShardedParameter]:
        modules = self.modules() if recurse else (self,)  # type: ignore[attr-defined]
        for module in modules:
            if isinstance(module, Zero3Module):
                yield from module._zero3_group.parameters


def _refused(name: str, why: str) -> Callable[..., NoReturn]:
    def method(self: Zero3Module, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not supported: {why}")

    method.__name__ = name
    return method


_REFUSED = {
    "set_all_reduce_hook": "the runtime communicates",
    "set_allocate_memory_from_process_group_for_comm": "the runtime has buffers of its own",
    "set_custom_all_gather": "the runtime communicates",
    "set_custom_reduce_scatter": "the runtime communicates",
    "set_keep_unsharded_storage": "the runtime has buffers of its own",
    "set_manual_backward_finalization": "every backward ends with its reductions",
    "set_force_sum_reduction_for_comms": "reductions sum always, and divide after",
    "set_post_optim_event": "the runtime waits for the current stream",
    "set_reduce_scatter_divide_factor": "call set_gradient_divide_factor",
    "set_reduce_scatter_max_input_buffers": "the runtime has buffers of its own",
    "set_separate_reduce_scatter_group": "reductions have a group of their own always",
    "set_unshard_in_backward": "eager backwards gather what was saved, compiled ones by their plan",
    "set_symm_mem_for_comm": "the runtime has buffers of its own",
}
"""Methods of FSDP2's, and why a :class:`Zero3Module` does not do as they say."""

for _name, _why in _REFUSED.items():
    setattr(Zero3Module, _name, _refused(_name, _why))


class _UnshardHandle(UnshardHandle):
    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def wait(self) -> None:
        if self._group.is_unsharded:
            self._group.wait_for_gather()


def _groups_of(modules: Iterable[Any]) -> list[weakref.ref[ParameterGroup]]:
    modules = list(modules)
    for module in modules:
        if not isinstance(module, Zero3Module):
            raise ValueError(f"{type(module).__name__} was not sharded: call fully_shard on it")
    return [weakref.ref(module._zero3_group) for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of ``module`` a forward too: in it, parameters are whole.

    Nothing happens if ``module`` itself was not given to ``fully_shard``, so that code for both
    may call it always.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, Zero3Module):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    group = module._zero3_group

    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = group.pre_forward(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            group.post_forward(module, args, None)
            raise
        return group.post_forward(module, args, output)

    setattr(module, method_name, forward)


def parameters_of(module: nn.Module) -> dict[str, ShardedParameter]:
    """The sharded parameters which ``module`` itself registers, by attribute name."""
    return module.__dict__.get("_zero3_parameters", {})


def all_parameters_of(model: nn.Module, caller: str) -> list[ShardedParameter]:
    """Those that are registered anywhere in ``model``, each once.

    Raises:
        Zero3Error: there is none; ``caller`` is who wants to know.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} takes a module, got {model!r}")
    found = (p for module in model.modules() for p in parameters_of(module).values())
    parameters = list(dict.fromkeys(found))
    if not parameters:
        name = type(model).__name__
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise Zero3Error(
                f"{caller}: the {name} was sharded by something else: import fully_shard from "
                "deepcompile_zero3"
            )
        raise Zero3Error(f"{caller}: no parameter of the {name} is sharded")
    return parameters


def original_class(module: nn.Module) -> type:
    """The class that ``module`` was built as."""
    return getattr(type(module), "_zero3_original", type(module))


def swap_class(module: nn.Module, group: ParameterGroup | None = None) -> None:
    """Gives ``module`` a property for each of its sharded parameters; with ``group``, also the
    methods of ``Zero3Module``.
    """
    cls = original_class(module)
    names = tuple(parameters_of(module))
    bases = (Zero3Module,) if group is not None or isinstance(module, Zero3Module) else ()
    if group is not None:
        module.__dict__["_zero3_group"] = group
    module.__class__ = _subclass(cls, bases, names)


class _Swapped:
    """Base of all swapped classes."""

    _zero3_original: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """What is made of this class anew, as a slice of a ``Sequential`` is, is not sharded."""
        return cls._zero3_original(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise Zero3Error(
            f"a sharded {type(self).__name__} cannot be deep-copied: copy the model before "
            "fully_shard, or build another one and load this one's state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Zero3Error(
            f"a sharded {type(self).__name__} cannot be pickled: save its state_dict with "
            "torch.distributed.checkpoint"
        )


@functools.cache
def _subclass(cls: type, bases: tuple[type, ...], names: tuple[str, ...]) -> type:
    """One class for all modules of one class and parameter names: compilers guard on it."""
    body: dict[str, Any] = {name: _property(name) for name in names}
    body["_zero3_original"] = cls
    body["__module__"] = cls.__module__
    body["__doc__"] = cls.__doc__
    return type(f"Zero3{cls.__name__}", (*bases, _Swapped, cls), body)


def _property(name: str) -> property:
    @torch_internals.inline_only
    def read(self: Any) -> torch.Tensor:
        parameter: ShardedParameter = self._zero3_parameters[name]
        if torch.compiler.is_compiling():
            settle(parameter.placeholder)
            parameter.graph_key == ""  # noqa: B015 (read so that it is guarded)
            full = ops.unshard.default(parameter.placeholder, parameter.contract)
            return full if parameter.is_read_as_gathered else parameter.layout.read(full)
        return parameter.group.read(parameter)

    return property(read, doc=f"The parameter ``{name}``: whole inside of a forward, else sharded.")
