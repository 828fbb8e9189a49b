"""Sizes of the results of nodes, in bytes."""

from typing import Any

import torch
from torch import fx

from deepcompile_zero3.torch_internals import compiler, is_wrapper


def nbytes_of(node: fx.Node) -> int:
    """Returns the size in bytes of the result of ``node``, or 0 if it is not a tensor."""
    value = node.meta.get("val")
    return nbytes_of_tensor(value) if isinstance(value, torch.Tensor) else 0


def nbytes_of_tensor(tensor: torch.Tensor) -> int:
    """Returns the size in bytes of ``tensor``, or 0 if its number of elements depends on data."""
    numel = tensor.numel()
    if compiler.free_unbacked_symbols(numel):
        return 0
    return int(numel) * tensor.element_size()


def nbytes_in_memory(tensor: torch.Tensor) -> int:
    """Returns the size in bytes of ``tensor``, or of the tensors in it if it is a wrapper."""
    if not is_wrapper(tensor):
        return nbytes_of_tensor(tensor)
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return sum(nbytes_in_memory(getattr(wrapper, name)) for name in names)


def hinted_nbytes_of(node: fx.Node) -> int:
    """Returns the size in bytes of a tensor. For symbols, takes the sizes of the example.

    Returns 0 if the result of ``node`` is not a tensor, or its size depends on data.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return (compiler.hint_of(value.numel()) or 0) * value.element_size()
