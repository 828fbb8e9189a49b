"""Bytes of what nodes give."""

import torch
from torch import fx

from deepcompile_zero3.torch_internals import compiler


def nbytes_of(node: fx.Node) -> int:
    """Bytes of what it gives, if that is a tensor."""
    value = node.meta.get("val")
    return nbytes_of_tensor(value) if isinstance(value, torch.Tensor) else 0


def nbytes_of_tensor(tensor: torch.Tensor) -> int:
    """Bytes of its elements; 0 where their number depends on data."""
    numel = tensor.numel()
    if compiler.free_unbacked_symbols(numel):
        return 0
    return int(numel) * tensor.element_size()
