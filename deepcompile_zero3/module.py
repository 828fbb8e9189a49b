"""The class swap: how ``layer.weight`` becomes something that a compiler can rewrite.

A module whose parameters are sharded gets a subclass of its class (``Linear`` -> ``Zero3Linear``)
with a property for each parameter. Traced, the property is one op, ``zero3.unshard``; in eager it
asks the parameter's group. ``module._parameters`` keeps the DTensors, so that ``parameters()``,
``state_dict()`` and optimizers see nothing else.
"""

import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.group import ParameterGroup
from deepcompile_zero3.parameter import ShardedParameter, settle
from deepcompile_zero3.runtime import ops


class Zero3Module:
    """What ``fully_shard`` adds to the module it was called on."""

    _zero3_group: ParameterGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module``'s. Dynamo skips frames of torch's own files: entering through this one,
        it traces the hooks around ``forward`` into the same graph.
        """
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> None:
        """Gathers the parameters of this module's group, for use outside of a forward.

        Not recursive. They stay whole until :meth:`reshard` or the end of the next eager forward;
        gradients that flow into them are reduced as in a forward.

        Raises:
            NotImplementedError: ``async_op=True``.
        """
        if async_op:
            raise NotImplementedError("unshard(async_op=True) is not supported yet")
        self._zero3_group.unshard()

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
            parameter.reshard_after_forward = reshard_after_forward

    def _zero3_parameters_below(self, recurse: bool) -> Iterator[ShardedParameter]:
        modules = self.modules() if recurse else (self,)  # type: ignore[attr-defined]
        for module in modules:
            if isinstance(module, Zero3Module):
                yield from module._zero3_group.parameters


def parameters_of(module: nn.Module) -> dict[str, ShardedParameter]:
    """The sharded parameters which ``module`` itself registers, by attribute name."""
    return module.__dict__.get("_zero3_parameters", {})


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
            settle(parameter.fqn)
            # Read so that it is guarded: graphs differ by it.
            parameter.reshard_after_forward in (True, False)  # noqa: B015
            return ops.unshard.default(parameter.placeholder, parameter.fqn, parameter.contract)
        return parameter.group.read(parameter)

    return property(read, doc=f"The parameter ``{name}``: whole inside of a forward, else sharded.")
