"""Finds parameters that modules keep in attributes of their own, where they would go stale."""

import collections
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.forward.swap import original_class

_log = logging.getLogger(__name__)

_REGISTRIES = ("_parameters", "_modules", "_buffers")  # of an nn.Module
_MOST_OBJECTS = 100_000  # to look at in an attribute: it may be a vocabulary


def check_private_references(
    modules: Sequence[nn.Module], fqn_of: Callable[[torch.Tensor], str | None]
) -> None:
    """Raises Zero3Error if a module in ``modules`` keeps a sharded parameter in an attribute too.

    The parameter would stay whole there, get no gradient, and go stale. Attributes are searched
    that are, to any depth, lists, tuples, sets, deques, dicts, dataclasses and
    ``types.SimpleNamespace``. No property is called.

    Args:
        modules: modules that are sharded now.
        fqn_of: returns the name of a tensor that is a parameter to shard, or was one.
    """
    seen: set[nn.Module] = set()
    for prefix, module in (each for root in modules for each in root.named_modules()):
        if module in seen:
            continue
        seen.add(module)
        # torch's own list of an RNN's weights is replaced with one that follows the parameters.
        skipped = (torch_internals.FLAT_WEIGHTS,) if isinstance(module, nn.RNNBase) else ()
        for attribute, value in vars(module).items():
            if attribute in _REGISTRIES or attribute in skipped:
                continue
            kind = original_class(module).__name__
            for path, parameter in _tensors_in(kind, attribute, value):
                if (fqn := fqn_of(parameter)) is None:
                    continue
                where = f"'{prefix}' ({kind})" if prefix else f"the {kind}"
                raise Zero3Error(
                    f"{where} keeps a second reference to the parameter '{fqn}' in {path}, which "
                    f"would get no gradient and go stale: {_remedy(module, parameter, fqn)} in "
                    "forward instead, or pass the parameter in ignored_params of the call that "
                    "shards it"
                )


def _remedy(module: nn.Module, parameter: torch.Tensor, fqn: str) -> str:
    for name, own in module._parameters.items():
        if own is parameter:
            return f"read self.{name}"
    owner, _, name = fqn.rpartition(".")
    holder = f"'{owner}'" if owner else "the outermost module"
    return f"keep the module that has the parameter, {holder}, and read its '{name}'"


def _tensors_in(kind: str, attribute: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in an attribute's value, each with an expression for its place.

    ``kind`` is the name of the module's class.
    """
    seen: set[int] = set()
    todo = collections.deque([(f"self.{attribute}", value)])
    while todo:
        if len(seen) == _MOST_OBJECTS:
            _warn_of_more(kind, attribute)
            return
        path, value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if issubclass(type(value), torch.Tensor):
            yield path, value
        else:
            todo.extend(_items_of(path, value))


@functools.cache  # equal layers have it too, and are searched again with the model around them
def _warn_of_more(kind: str, attribute: str) -> None:
    _log.warning(
        "a %s has more than %d objects in self.%s: fully_shard has not looked for references to "
        "parameters among the rest, which would get no gradient and go stale",
        kind,
        _MOST_OBJECTS,
        attribute,
    )


def _items_of(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    kind = type(value)  # isinstance() would ask a proxy of an object, which may be gone
    if issubclass(kind, dict):
        return [(f"{path}[{_named(key)}]", item) for key, item in dict.items(value)]
    if issubclass(kind, list | tuple | collections.deque):
        return [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    if issubclass(kind, set | frozenset):
        return [(path, item) for item in value]
    is_dataclass = dataclasses.is_dataclass(kind) and not issubclass(kind, nn.Module)
    if is_dataclass or issubclass(kind, SimpleNamespace):
        attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for field in dataclasses.fields(value) if is_dataclass else ():
            slot = inspect.getattr_static(kind, field.name, None)
            if isinstance(slot, MemberDescriptorType) and hasattr(value, field.name):
                attributes[field.name] = getattr(value, field.name)
        return [(f"{path}.{name}", item) for name, item in attributes.items()]
    return ()


def _named(key: Any) -> str:
    """Returns ``repr(key)``, or the class of an object, whose ``repr`` may print a tensor."""
    return repr(key) if type(key) in (str, int) else f"<{type(key).__name__}>"
