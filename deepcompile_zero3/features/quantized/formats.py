"""Chooses the format in which a parameter is quantized: see ``codec``."""

import math

import torch

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.parameter import ShardedParameter

_SOURCES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 128


def can_be_quantized(tensor: torch.Tensor) -> bool:
    """Returns whether a parameter has rows of elements of at least 16 bits."""
    return tensor.ndim >= 2 and tensor.dtype in _SOURCES and tensor.numel() > 0


def format_of(
    dtype: torch.dtype, block: int | None, what: str, name: str, shape: torch.Size, row: int
) -> str:
    """Returns the format of a parameter.

    Args:
        dtype: dtype of the codes.
        block: number of elements in a block, or None for 128 where that divides a row, or else the
            whole row.
        what: what the caller calls ``block``.
        name: name of the parameter.
        shape: its shape.
        row: number of elements in a row.

    Raises:
        Zero3Error: ``block`` does not divide a row.
    """
    block = block or (_BLOCK if row % _BLOCK == 0 else row)
    if row % block:
        raise Zero3Error(
            f"{what} is {block}, which does not divide a row of '{name}' {list(shape)}, {row} "
            f"elements: choose a divisor of {row}, or None"
        )
    return f"{str(dtype).removeprefix('torch.')}/{block}"


def format_of_parameter(
    dtype: torch.dtype | None, block: int | None, parameter: ShardedParameter
) -> str:
    """Returns the format of ``parameter``; empty if it is not quantized. See :func:`format_of`.

    ``dtype`` is None if nothing is quantized.
    """
    if dtype is None or not can_be_quantized(parameter.shard):
        return ""
    row = math.prod(parameter.handle.sizes[1:])
    return format_of(dtype, block, "block", parameter.fqn, parameter.shard.shape, row)
