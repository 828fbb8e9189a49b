"""Casts of a forward's inputs and output, as the policy of mixed precision asks."""

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.torch_release import RELEASE

# Whether Dynamo traces the attributes of an object, and what makes objects without ``__init__``.
_TRACES_ATTRIBUTES = RELEASE >= (2, 13)


class ForwardCasts:
    """The casts that one policy asks for."""

    def __init__(self, policy: MixedPrecisionPolicy) -> None:
        self._input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self._output_dtype = policy.output_dtype

    def inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns a forward's arguments with all floating tensors in the policy's dtype.

        A container in which no tensor changes is passed on itself, so that a forward can write to
        it. Others are copied: what is written to a copy is not seen by the caller.
        """
        if self._input_dtype is not None:
            args, kwargs = _cast_floats((args, kwargs), self._input_dtype)
        return args, kwargs

    def output(self, output: Any) -> Any:
        """Returns a forward's output with all floating tensors in the policy's dtype."""
        dtype = self._output_dtype
        return output if dtype is None else _cast_floats(output, dtype)


def _cast_floats(value: Any, dtype: torch.dtype, above: Sequence[tuple[Any, Any]] = ()) -> Any:
    """Returns ``value`` with its floating tensors in ``dtype``.

    A container in which no tensor changes is returned itself. Others are shallow copies, made
    without ``__init__``: what is not a tensor to cast stays as it is.

    Args:
        value: tensors, and lists, tuples, deques, dicts, dataclasses, their subclasses, and what is
            registered with pytree, of any depth.
        dtype: a floating dtype.
        above: the containers that ``value`` is in, each with its copy. They may be in ``value``
            too.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if not isinstance(value, tuple):  # Dynamo does not compare tuples; a cycle has another object
        for original, made in above:
            if original is value:
                return made
    if not _holds_others(value, dtype, ()):
        return value
    rebuilds = _rebuilds(value)
    if isinstance(value, tuple) and not _is_structseq(value) and not rebuilds:
        made = tuple.__new__(type(value), [_cast_floats(each, dtype, above) for each in value])
        if _TRACES_ATTRIBUTES or not torch.compiler.is_compiling():
            for name, attribute in getattr(value, "__dict__", {}).items():
                object.__setattr__(made, name, attribute)
        return made
    is_dataclass = _is_dataclass(value)
    if rebuilds or not (is_dataclass or isinstance(value, list | deque | dict)):
        children, spec = _flatten_once(value)
        above = (*above, (value, value))
        return torch_internals.tree_unflatten(
            [_cast_floats(each, dtype, above) for each in children], spec
        )
    made = _shallow_copy(value)
    above = (*above, (value, made))
    if is_dataclass:
        fields = [(name, getattr(value, name)) for name in _fields_of(value)]
        replaced = [
            (name, _cast_floats(field, dtype, above))
            for name, field in fields
            if _holds_others(field, dtype, ())
        ]
        if torch.compiler.is_compiling() and value.__dataclass_params__.frozen:
            made = _shallow_copy(value)  # a graph returns a frozen one only with fields made before
        for name, field in replaced:
            object.__setattr__(made, name, field)
    if isinstance(value, dict):
        for key, item in value.items():
            if _holds_others(item, dtype, ()):
                dict.__setitem__(made, key, _cast_floats(item, dtype, above))
    elif isinstance(value, list):
        made[:] = [_cast_floats(each, dtype, above) for each in value]
    elif isinstance(value, deque):
        for i, each in enumerate(value):
            made[i] = _cast_floats(each, dtype, above)
    return made


def _holds_others(value: Any, dtype: torch.dtype, above: Sequence[Any]) -> bool:
    """Whether ``value`` is or holds a floating tensor of another dtype."""
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() and value.dtype != dtype
    if not isinstance(value, tuple):
        for container in above:
            if container is value:
                return False
        above = (*above, value)
    return any(_holds_others(child, dtype, above) for child in _children_of(value))


def _children_of(value: Any) -> Sequence[Any]:
    if value is None or isinstance(value, bool | int | float | str | nn.Module | type):
        return ()
    children = []
    if is_dataclass := _is_dataclass(value):
        children += [getattr(value, name) for name in _fields_of(value)]
    if isinstance(value, dict):
        return [*children, *value.values()]
    if isinstance(value, list | tuple | deque):
        return [*children, *value]
    if is_dataclass:
        return children
    children, _ = _flatten_once(value)
    return () if len(children) == 1 and children[0] is value else children


def _flatten_once(value: Any) -> tuple[list[Any], Any]:
    """Flattens ``value``, but not what is in it."""
    return torch_internals.tree_flatten(value, is_leaf=lambda each: each is not value)


def _shallow_copy(value: Any) -> Any:
    """Returns ``copy.copy(value)``, in operations that Dynamo traces."""
    if type(value) is list:
        return [*value]
    if type(value) is dict:
        return {**value}
    if type(value) is deque:
        return deque(value, value.maxlen)
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, value)
    if isinstance(value, list | deque | dict) or not torch.compiler.is_compiling():
        return copy.copy(value)
    made = object.__new__(type(value))
    for name in _fields_of(value):  # it may have slots
        object.__setattr__(made, name, getattr(value, name))
    if _TRACES_ATTRIBUTES and hasattr(value, "__dict__"):
        for name, attribute in value.__dict__.items():
            object.__setattr__(made, name, attribute)
    return made


def _rebuilds(value: Any) -> bool:
    """Returns whether pytree makes a new container, with its own attributes alone."""
    if _TRACES_ATTRIBUTES or not torch.compiler.is_compiling():
        return False
    if type(value) is tuple or type(value) is list or type(value) is dict or type(value) is deque:
        return False
    children, _ = _flatten_once(value)
    return not (len(children) == 1 and children[0] is value)


def _is_dataclass(value: Any) -> bool:
    if type(value) is OrderedDict or type(value) is defaultdict:
        return False  # torch 2.11 cannot ask them for an attribute
    # Not is_dataclass(): torch 2.11 breaks a graph at an attribute of a type.
    return isinstance(getattr(value, "__dataclass_fields__", None), dict)


def _fields_of(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _is_structseq(value: tuple) -> bool:
    """Whether ``value`` is a result of torch such as that of ``max``, which tuple cannot make."""
    return isinstance(getattr(value, "n_fields", None), int)
