"""Casts of a forward's inputs and output, as the policy of mixed precision asks."""

import copy
import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.torch_release import RELEASE

# Whether Dynamo traces attributes of objects, and functions that make objects without ``__init__``.
_TRACES_ATTRIBUTES = RELEASE >= (2, 13)
_LEAVES = (bool, int, float, str, bytes, type, nn.Module)
# Dynamo does not compare these. One can contain itself only through another container.
_NOT_COMPARED = (tuple, deque, set, frozenset)

# Names of a container's fields; values of the fields, then items; and pytree's spec to rebuild it.
_Parts: TypeAlias = tuple[Sequence[str], Sequence[Any], Any]
_NO_PARTS: _Parts = ((), (), None)


class ForwardCasts:
    """The casts that one policy asks for."""

    def __init__(self, policy: MixedPrecisionPolicy) -> None:
        self._input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self._output_dtype = policy.output_dtype

    def inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns a forward's arguments with all floating tensors in the policy's dtype.

        A container in which no tensor changes is passed on itself, so that a forward can write to
        it. Others are copied: the caller does not see writes to a copy.
        """
        if self._input_dtype is not None:
            args, kwargs = _Cast(self._input_dtype).of((args, kwargs))
        return args, kwargs

    def output(self, output: Any) -> Any:
        """Returns a forward's output with all floating tensors in the policy's dtype."""
        dtype = self._output_dtype
        return output if dtype is None else _Cast(dtype).of(output)


class _Cast:
    """A cast of tensors, and of the containers that they are in.

    Containers are lists, tuples, sets, deques, dicts, dataclasses, their subclasses, and classes
    that are registered with pytree, of any depth. A container without a tensor to cast is returned
    itself. Others are shallow copies, made without ``__init__``. An object that appears several
    times, or contains itself, does so in the result too.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._is_traced = torch.compiler.is_compiling()
        # Tensors to cast, and possible containers. All lists below have an entry for each.
        self._found: list[Any] = []
        self._index_of: dict[int, int] = {}  # by id
        self._holders: list[list[int]] = []  # indices of the containers that it is in
        self._parts: list[tuple[_Parts, list[int]]] = []  # its parts, and their indices
        self._changes: list[bool] = []
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Returns ``value`` with its floating tensors in the dtype."""
        root = self._index(value)
        changed = []
        at = 0
        while at < len(self._found):
            found = self._found[at]
            is_tensor = isinstance(found, torch.Tensor)
            parts = _NO_PARTS if is_tensor else _parts_of(found)
            indices = [self._index(part) for part in parts[1]]
            for index in indices:
                if index >= 0:
                    self._holders[index].append(at)
            self._parts.append((parts, indices))
            self._changes.append(is_tensor)
            if is_tensor:
                changed.append(at)
            at += 1
        if not changed:
            return value
        while changed:
            for holder in self._holders[changed.pop()]:
                if not self._changes[holder]:
                    self._changes[holder] = True
                    changed.append(holder)
        return self._new(value, root)

    def _index(self, value: Any) -> int:
        """Returns the index of a tensor to cast or of a possible container, -1 of other values."""
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point() or value.dtype == self._dtype:
                return -1
        elif value is None or isinstance(value, _LEAVES):
            return -1
        if not self._is_traced:
            index = self._index_of.setdefault(id(value), len(self._found))
            if index < len(self._found):
                return index
        elif not isinstance(value, _NOT_COMPARED):
            for index, found in enumerate(self._found):
                if type(found) is type(value) and found is value:
                    return index
        self._found.append(value)
        self._holders.append([])
        return len(self._found) - 1

    def _new(self, value: Any, index: int) -> Any:
        if index < 0 or not self._changes[index]:
            return value
        if index not in self._made:
            made = value.to(self._dtype) if isinstance(value, torch.Tensor) else self._copy(index)
            self._made.setdefault(index, made)
        return self._made[index]

    def _copy(self, index: int) -> Any:
        """Returns a copy of a container, with its parts cast."""
        value = self._found[index]
        (names, parts, spec), indices = self._parts[index]
        is_made_first = spec is None and not isinstance(value, tuple | frozenset)
        # The container may be in its own parts.
        if is_made_first:
            self._made[index] = _shallow_copy(value)
        elif spec is not None:
            self._made[index] = value
        new = [self._new(part, i) for part, i in zip(parts, indices, strict=True)]
        if spec is not None:
            del self._made[index]
            return torch_internals.tree_unflatten(new, spec)
        if isinstance(value, tuple):
            made = tuple.__new__(type(value), new)
            if _TRACES_ATTRIBUTES or not self._is_traced:
                for name, attribute in getattr(value, "__dict__", {}).items():
                    object.__setattr__(made, name, attribute)
            return made
        if isinstance(value, frozenset):
            return type(value)(new)
        changes = [i >= 0 and self._changes[i] for i in indices]
        if names and self._is_traced and value.__dataclass_params__.frozen:
            # A graph can return a frozen dataclass only if its fields were made before it.
            self._made[index] = _shallow_copy(value)
        made = self._made[index]
        for name, field, is_new in zip(names, new, changes, strict=False):
            if is_new:
                object.__setattr__(made, name, field)
        items, changes = new[len(names) :], changes[len(names) :]
        if isinstance(value, dict):
            for key, item, is_new in zip(value, items, changes, strict=True):
                if is_new:
                    dict.__setitem__(made, key, item)
        elif isinstance(value, list):
            made[:] = items
        elif isinstance(value, set):
            made.clear()
            made.update(items)
        else:  # a deque
            for i, item in enumerate(items):
                made[i] = item
        return made


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors of a forward's output: ``value``, and those in containers of any depth."""
    found, seen = [value], set()
    for each in found:  # which grows
        if isinstance(each, torch.Tensor):
            yield each
        elif each is not None and not isinstance(each, _LEAVES) and id(each) not in seen:
            seen.add(id(each))
            found += _parts_of(each)[1]


def _parts_of(value: Any) -> _Parts:
    if type(value) is tuple or type(value) is list:
        return (), value, None
    if type(value) is dict:
        return (), [*value.values()], None
    if _rebuilds(value):
        children, spec = _flatten_once(value)
        return (), children, spec
    names: list[str] = []
    if is_dataclass := _is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value) if hasattr(value, each.name)]
    fields = [getattr(value, name) for name in names]
    if isinstance(value, dict):
        return names, [*fields, *value.values()], None
    if isinstance(value, list | tuple | deque | set | frozenset):
        return names, [*fields, *value], None
    if is_dataclass:
        return names, fields, None
    children, spec = _flatten_once(value)
    return _NO_PARTS if len(children) == 1 and children[0] is value else ((), children, spec)


def _flatten_once(value: Any) -> tuple[list[Any], Any]:
    """Flattens ``value``, but not the containers in it."""
    return torch_internals.tree_flatten(value, is_leaf=lambda each: each is not value)


def _shallow_copy(value: Any) -> Any:
    """Returns ``copy.copy(value)``, in operations that Dynamo traces."""
    if type(value) is list:
        return [*value]
    if type(value) is dict:
        return {**value}
    if type(value) is set:
        return {*value}
    if type(value) is deque:
        return deque(value, value.maxlen)
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, value)
    if isinstance(value, list | deque | dict | set) or not torch.compiler.is_compiling():
        return copy.copy(value)
    made = object.__new__(type(value))
    for field in dataclasses.fields(value):  # it may have slots
        if hasattr(value, field.name):
            object.__setattr__(made, field.name, getattr(value, field.name))
    if _TRACES_ATTRIBUTES and hasattr(value, "__dict__"):
        for name, attribute in value.__dict__.items():
            object.__setattr__(made, name, attribute)
    return made


def _rebuilds(value: Any) -> bool:
    """Returns whether pytree makes the new container, which loses attributes unknown to pytree."""
    if isinstance(value, tuple) and isinstance(getattr(value, "n_fields", None), int):
        return True  # a named result of torch, as ``max`` has, which tuple cannot make
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
