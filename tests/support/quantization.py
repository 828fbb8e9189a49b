"""Quantization of parameters as plain PyTorch does it: what ranks must compute with."""

import pytest
import torch

FORMATS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
each_format = pytest.mark.parametrize("dtype", list(FORMATS), ids=str)


def quantized(tensor, dtype, block):
    """Returns codes and scales of ``tensor`` [rows, ...], whose rows have blocks of elements."""
    blocks = tensor.detach().float().reshape(tensor.shape[0], -1, block)
    finite = torch.where(blocks.isfinite(), blocks, 0).abs()
    tiny = torch.finfo(torch.float32).tiny
    scales = (finite.amax(-1, keepdim=True) / FORMATS[dtype]).clamp_min(tiny)
    overflows = (scales * FORMATS[dtype]).isinf()
    scales = torch.where(overflows, torch.nextafter(scales, torch.zeros(())), scales)
    scaled = blocks / scales
    if dtype is torch.int8:
        return torch.where(scaled.isfinite(), scaled.round(), -128).to(dtype), scales
    if dtype is torch.float8_e4m3fn:  # which has no infinity
        scaled = torch.where(scaled.isfinite(), scaled, torch.nan)
    return scaled.to(dtype), scales


def rounded(tensor, dtype, block):
    """Returns ``tensor``, quantized and read back."""
    codes, scales = quantized(tensor, dtype, block)
    values = codes.float()
    if dtype is torch.int8:
        values = torch.where(codes == -128, torch.nan, values)
    return (values * scales).reshape(tensor.shape).to(tensor.dtype)


def bits(tensor):
    """Returns the bits of a float32 tensor, with one NaN for all."""
    return torch.where(tensor.isnan(), torch.nan, tensor.float()).view(torch.int32)


def difficult(*shape, seed=0):
    """Returns numbers of all magnitudes, zeros, subnormal numbers, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values *= torch.exp2(
        torch.randint(-140, 120, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
    )
    flat = values.view(-1)
    places = torch.randperm(flat.numel(), generator=generator)
    for number, special in enumerate((0.0, -0.0, 1e-44, torch.inf, -torch.inf, torch.nan)):
        flat[places[number::97]] = special
    if flat.numel() > 1000:
        flat[places[50]] = -torch.finfo(torch.float32).max
    return values
