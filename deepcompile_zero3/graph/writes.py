"""Finds the operations of Dynamo's graphs that may write to their arguments."""

import inspect
import operator
from typing import Any

import torch
from torch import fx

from deepcompile_zero3 import torch_internals

CALLS = ("call_function", "call_method")
_IN_PLACE = {
    getattr(operator, name)
    for name in (
        *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior"),
        *("ipow", "irshift", "isub", "itruediv", "ixor", "setitem", "delitem"),
    )
}


def writes(node: fx.Node) -> bool:
    """Returns whether an operation of Dynamo's graph may write to one of its arguments."""
    target: Any = node.target
    if node.op not in CALLS:
        return False
    if isinstance(target, torch_internals.OpOverload):
        return torch_internals.schema_of(target).is_mutable
    if isinstance(target, torch_internals.OpOverloadPacket):
        overloads = (getattr(target, name) for name in target.overloads())
        return any(torch_internals.schema_of(each).is_mutable for each in overloads)
    if target in _IN_PLACE:
        return True
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in ("batch_norm", "instance_norm"):
        return True  # to running statistics
    try:
        arguments = inspect.signature(target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a method, or a builtin
        arguments = node.kwargs
    is_named_so = name.endswith("_") and not name.endswith("__")
    return is_named_so or bool(arguments.get("inplace")) or arguments.get("out") is not None


def written_storages(graph: fx.Graph) -> set[int]:
    """Returns the addresses of all storages that operations of Dynamo's graph may write to.

    A wrapper counts with the tensors in it.
    """
    values = (
        read.meta.get("example_value")
        for node in graph.nodes
        if writes(node)
        for read in node.all_input_nodes
    )
    found: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor) and not torch_internals.is_transformed(value):
            found |= storages_of(value)
    return found


def storages_of(tensor: Any) -> set[int]:
    """Returns the addresses of the storages of a tensor and, in a wrapper, of those inside."""
    found = {torch_internals.storage_address(tensor)}
    if torch_internals.is_wrapper(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        found |= {s for each in inner if isinstance(each, torch.Tensor) for s in storages_of(each)}
    return found
