"""How rows travel that are quantized: codes of one byte, and a scale for each block of a row.

A *format* is text, such as ``float8_e4m3fn/128``: the dtype of the codes, and the number of
elements in a block. Blocks lie within a row of the runtime, so that the rounded values do not
depend on the number of ranks. Empty text stands for no quantization.
"""

import torch

from deepcompile_zero3.errors import Zero3Error

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_SOURCES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_BLOCK = 128


def check_dtype(what: str, dtype: object) -> None:
    """Raises ValueError unless codes can have ``dtype``. The message begins with ``what``."""
    if dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise ValueError(f"{what} must be one of {known}, got {dtype!r}")


def check_block(what: str, block: object) -> None:
    """Raises ValueError unless ``block`` is None or a number of elements."""
    if block is not None and (type(block) is not int or block < 1):
        raise ValueError(f"{what} must be an int of at least 1, got {block!r}")


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


def nbytes_of(format: str, rows: int, row: int) -> int:
    """Returns the bytes of quantized rows: codes, up to a multiple of four bytes, and scales."""
    block = int(format.partition("/")[2])
    return rows * (-(-row // 4) * 4 + 4 * (row // block))
