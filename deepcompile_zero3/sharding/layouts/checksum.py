"""Checksums of tensors, which ranks compare in place of values."""

import math
from typing import Any

import torch

from deepcompile_zero3 import grad_dtype, torch_internals

_ODD = -0x61C8864680B583EB  # 2**64 divided by the golden ratio, an odd int64: spreads hashes


def checksum(values: torch.Tensor) -> int | None:
    """Returns a hash of ``values``, or None if they are on the meta device.

    A sum of bits alone would be the same for values that are negated or in another order.
    """
    if values.is_meta:
        return None
    if torch_internals.is_wrapper(values):
        wrapper: Any = values
        names, _ = wrapper.__tensor_flatten__()
        parts = [checksum(getattr(wrapper, name)) for name in names]
        return None if None in parts else hash(tuple(parts))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    start = 0
    for piece in values.detach().flatten().split(1 << 16):  # small enough for a processor's cache
        bits = _bits(piece)
        hashes = torch.arange(start, start + bits.numel(), device=values.device)
        start += bits.numel()
        hashes.mul_(_ODD).add_(bits)
        hashes.bitwise_xor_(hashes >> 32).mul_(_ODD)
        total += hashes.bitwise_xor_(hashes >> 32).sum()
    return int(total)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Returns integers that are equal for equal ``values``, for both zeros and for all NaNs.

    For dtypes that gradients cannot have, the integers are the bytes.
    """
    if values.dtype not in grad_dtype.DTYPES:
        return values.view(torch.uint8)
    values = values.double() if values.element_size() == 8 else values.float()
    values = (values + 0.0).masked_fill_(values.isnan(), math.nan)
    return values.view(torch.int64 if values.element_size() == 8 else torch.int32)
