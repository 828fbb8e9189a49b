"""Casts of a forward's inputs and output, as the policy of mixed precision asks."""

import copy
import dataclasses
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3 import torch_internals


class ForwardCasts:
    """The casts that one policy asks for."""

    def __init__(self, policy: MixedPrecisionPolicy) -> None:
        self._input_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self._output_dtype = policy.output_dtype

    def inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns a forward's arguments with all floating tensors in the policy's dtype."""
        if self._input_dtype is not None:
            args, kwargs = _cast_floats((args, kwargs), self._input_dtype)
        return args, kwargs

    def output(self, output: Any) -> Any:
        """Returns a forward's output with all floating tensors in the policy's dtype."""
        dtype = self._output_dtype
        return output if dtype is None else _cast_floats(output, dtype)


def _cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        # Not is_dataclass(): torch 2.11 breaks a graph at an attribute of a type.
        is_dataclass = isinstance(getattr(leaf, "__dataclass_fields__", None), dict)
        if is_dataclass and not isinstance(leaf, type):
            values = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
            return dataclasses.replace(leaf, **_cast_floats(values, dtype))
        if isinstance(leaf, dict):  # a subclass that torch does not know
            cast_dict = copy.copy(leaf)
            cast_dict.update(_cast_floats(dict(leaf), dtype))
            return cast_dict
        return leaf

    return torch_internals.tree_map(cast, tree)
