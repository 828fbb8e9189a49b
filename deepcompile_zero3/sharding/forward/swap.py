"""The class swap: a property for each parameter, which a compiler traces.

A module whose parameters are sharded gets a subclass of its class: ``Linear`` -> ``Zero3Linear``,
or ``FSDPLinear`` if ``fully_shard`` was called on it. In a trace the property is one op,
``zero3.unshard``, or several if the parameter has an all-gather extension. In eager code it asks
the parameter's group. ``module._parameters`` keeps the DTensors, so that ``parameters()``,
``state_dict()`` and optimizers see nothing else.
"""

import contextlib
import weakref
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C, ops
from deepcompile_zero3.sharding.forward.flat_weights import ReadsFlatWeights, forget_flat_weights
from deepcompile_zero3.sharding.forward.parameter_lists import bases_of_container
from deepcompile_zero3.sharding.forward.reads import mark_no_forward, modules_in_traced_forward
from deepcompile_zero3.sharding.forward.traced_writes import (
    end_graph_if_changed,
    refuse_traced_writes,
)
from deepcompile_zero3.sharding.group import ParameterGroup, group_of, group_or_none
from deepcompile_zero3.sharding.module import Zero3Module
from deepcompile_zero3.sharding.module_parameters import parameters_of
from deepcompile_zero3.sharding.parameter import ShardedParameter, parameter_of
from deepcompile_zero3.torch_internals import dynamo_trace
from deepcompile_zero3.torch_release import RELEASE

# Name of a parameter, whether it is read as gathered, and whether it has attributes to carry over.
_Read: TypeAlias = tuple[str, bool, bool]


def original_class(module: nn.Module) -> type:
    """Returns the class of ``module`` before ``swap_class``."""
    return getattr(type(module), "_zero3_original", type(module))


def swap_class(module: nn.Module, group: ParameterGroup | None = None) -> None:
    """Gives ``module`` a property for each of its sharded parameters.

    With ``group``, the module gets the methods of ``Zero3Module`` too.
    """
    cls = original_class(module)
    parameters = parameters_of(module).items()
    reads = tuple((n, p.is_read_as_gathered, bool(p.registered.attributes)) for n, p in parameters)
    bases = (Zero3Module,) if group is not None or isinstance(module, Zero3Module) else ()
    if group is not None:
        module.__dict__["_zero3_group"] = group
    module.__class__ = _subclass(cls, bases, reads)
    forget_flat_weights(module)


class _Swapped:
    """Base of all swapped classes."""

    _zero3_original: type

    def __init_subclass__(cls) -> None:
        """Does not call the user's ``__init_subclass__``, which may register subclasses."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a plain module of the original class, such as a slice of a ``Sequential``."""
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


# Weak: torch makes a class for each parametrized module, and the class refers to the module.
_subclasses: weakref.WeakKeyDictionary[type, weakref.WeakValueDictionary[tuple, type]] = (
    weakref.WeakKeyDictionary()
)


def _subclass(cls: type, bases: tuple[type, ...], reads: tuple[_Read, ...]) -> type:
    """Returns one class for all modules that are alike: compilers guard on it.

    ``reads`` are the parameters' names, and whether they are read as gathered and have attributes.
    """
    known = _subclasses.setdefault(cls, weakref.WeakValueDictionary())
    found = known.get((bases, reads))
    if found is None:
        found = known[bases, reads] = _new_subclass(cls, bases, reads)
    return found


def _new_subclass(cls: type, bases: tuple[type, ...], reads: tuple[_Read, ...]) -> type:
    body: dict[str, Any] = {read[0]: _property(*read) for read in reads}
    body["_zero3_original"] = cls
    calls = "__call__", "_wrapped_call_impl", "_call_impl"
    body["_zero3_may_skip_call"] = all(getattr(cls, c) is getattr(nn.Module, c) for c in calls)
    body["__module__"] = cls.__module__
    body["__doc__"] = cls.__doc__
    prefix = "FSDP" if bases else "Zero3"  # FSDP2's prefix, which frameworks strip from names
    if issubclass(cls, nn.RNNBase):
        bases = (*bases, ReadsFlatWeights)
    bases = (*bases, *bases_of_container(cls))
    return type(f"{prefix}{cls.__name__}", (_Swapped, *bases, cls), body)


def _property(name: str, is_read_as_gathered: bool, has_attributes: bool) -> property:
    # Dynamo takes a millisecond to trace the read of an attribute.
    @torch_internals.inline_only
    def read(self: Any) -> torch.Tensor:
        parameter: ShardedParameter = self._zero3_parameters[name]
        if torch.compiler.is_dynamo_compiling():  # False where Dynamo's guards call hasattr()
            placeholder = parameter.placeholder
            contract = _contract_in_forward(placeholder)
            if contract is None:  # eager code decides, by a state that Dynamo guards on
                if not parameter.reads.are_whole:
                    return self._parameters[name]
                contract = _contract_outside_forward(placeholder)
            if not parameter.guard_key:  # never: a branch makes Dynamo guard on its condition
                raise AssertionError(f"'{parameter.fqn}' has no key")
            substitute = parameter.substitute
            if substitute is None:
                full = ops.unshard.default(placeholder, contract)
            else:
                parts = [_unshard(each.placeholder) for each in substitute.sources]
                full = substitute.full(parts, substitute.metadata)
                if placeholder.requires_grad and torch.is_grad_enabled():
                    full = ops.unshard_as.default(full, placeholder, contract)
            if is_read_as_gathered and not has_attributes:
                return full
            value = parameter.layout.value_of(full)
            parameter.registered.give_attributes(value)
        else:
            try:
                value = group_of(parameter).read(parameter)
            except AttributeError as error:  # nn.Module.__getattr__ would return the shard
                raise Zero3Error(f"reading '{parameter.fqn}' failed: {error}") from error
        # A local tensor is registered while code computes with local tensors: `is_local_part`.
        if isinstance(value, DTensor) and not isinstance(self._parameters[name], DTensor):
            return value.to_local()
        return value

    return property(read, doc=f"The parameter ``{name}``: whole inside of a forward, else sharded.")


# Code of the properties, which all have the same.
_READ = _property("", True, False).fget.__code__  # type: ignore[union-attr]


@torch_internals.inline_only
def _unshard(placeholder: torch.Tensor) -> torch.Tensor:
    return ops.unshard.default(placeholder, "any")


@torch_internals.assume_constant_result
def _contract_in_forward(placeholder: torch.Tensor) -> str | None:
    """Prepares a parameter that a traced forward reads, and returns its contract.

    Dynamo calls this function while it traces, and no graph does. Returns None if Dynamo traces no
    forward of a module that gathers the parameter. The frame may still run inside of an eager one.
    """
    parameter = parameter_of(placeholder)
    if parameter is None or _is_traced_in_forward(parameter):
        return _prepare(placeholder)
    # Activations may be recomputed, as in ParameterGroup.read.
    recomputes = torch.is_grad_enabled() and _C.in_backward() and not parameter.reads.are_whole
    return _prepare(placeholder) if recomputes else None


@torch_internals.assume_constant_result
def _contract_outside_forward(placeholder: torch.Tensor) -> str:
    """Prepares a parameter that eager code has gathered, and returns its contract."""
    dynamo_trace.when_traced(mark_no_forward)
    return _prepare(placeholder)


def _is_traced_in_forward(parameter: ShardedParameter) -> bool:
    group = group_or_none(parameter)
    groups = set() if group is None else set(group.ancestry())
    modules = modules_in_traced_forward()
    return any(getattr(module, "_zero3_group", None) in groups for module in modules)


def _prepare(placeholder: torch.Tensor) -> str:
    """Prepares a parameter whose gathered tensor is being traced, and returns its contract.

    Hides a Zero3Error of the preparation: the graph raises it when it runs.
    """
    if torch_internals.is_differentiated_by_transform():
        if RELEASE < (2, 13):
            raise Zero3Error(
                "torch.func differentiates a function of a sharded parameter in what is compiled. "
                "Dynamo would leave it to eager code, and this release of torch then computes some "
                "derivatives wrongly: decorate the code with torch.compiler.disable"
            )
        dynamo_trace.refuse_to_be_traced("a sharded parameter that torch.func differentiates")
    dynamo_trace.when_traced(refuse_traced_writes)
    dynamo_trace.guard_on(_READ, "parameter", "leaf")
    parameter = parameter_of(placeholder)
    if parameter is None:
        return ""  # its model was deleted: running the graph tells
    with contextlib.suppress(Zero3Error):
        parameter.prepare_forward()
    end_graph_if_changed(parameter)
    if parameter.substitute is not None and not parameter.substitute.is_prepared:
        parameter.substitute.prepare_graph(parameter.registered.local)
    return parameter.contract
