"""How rows travel that are quantized: codes of one byte, and a scale for each block of a row.

A *format* is text, such as ``float8_e4m3fn/128``: the dtype of the codes, and the number of
elements in a block. Blocks lie within a row of the runtime, so that the rounded values do not
depend on the number of ranks. Empty text stands for no quantization.
"""

import torch

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def check_dtype(what: str, dtype: object) -> None:
    """Raises ValueError unless codes can have ``dtype``. The message begins with ``what``."""
    if dtype not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise ValueError(f"{what} must be one of {known}, got {dtype!r}")


def check_block(what: str, block: object) -> None:
    """Raises ValueError unless ``block`` is None or a number of elements."""
    if block is not None and (type(block) is not int or block < 1):
        raise ValueError(f"{what} must be an int of at least 1, got {block!r}")


def nbytes_of(format: str, rows: int, row: int) -> int:
    """Returns the bytes of quantized rows: codes, up to a multiple of four bytes, and scales."""
    block = int(format.partition("/")[2])
    return rows * (-(-row // 4) * 4 + 4 * (row // block))
