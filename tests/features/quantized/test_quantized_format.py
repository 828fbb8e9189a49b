"""The format of quantized gathers: codes and scales are those that PyTorch computes."""

import pytest
import torch
from support.quantization import FORMATS, bits, difficult, each_format, quantized, rounded

from deepcompile_zero3.runtime import _C


def _format(dtype, block):
    return f"{str(dtype).removeprefix('torch.')}/{block}"


@each_format
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("rows", "row", "block"), [(64, 96, 32), (3, 7, 7), (5, 12, 1), (9, 1, 1)])
def test_codes_and_scales_are_those_of_pytorch(dtype, source, rows, row, block):
    values = difficult(rows, row).to(source)
    numbers = quantized(values, dtype, block)
    bytes_of = _C.quantize(values, _format(dtype, block))
    padded = -(-row // 4) * 4
    assert bytes_of.shape == (rows, padded + row // block * 4)
    codes = bytes_of[:, :row].contiguous().view(dtype).float()
    expected = numbers[0].view(rows, row).float()
    assert torch.equal(bits(codes), bits(expected))
    assert not bytes_of[:, row:padded].any()
    scales = bytes_of[:, padded:].contiguous().view(torch.float32)
    assert torch.equal(scales, numbers[1].view(rows, -1))
    back = torch.empty(rows, row)
    _C.dequantize(back, bytes_of, _format(dtype, block))
    assert torch.equal(bits(back), bits(rounded(values.float(), dtype, block)))


@each_format
def test_each_code_is_read_as_pytorch_reads_it(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    scale = torch.full((1, 1), 0.75).view(torch.uint8)
    values = torch.empty(1, 256)
    _C.dequantize(values, torch.cat([codes, scale], 1), _format(dtype, 256))
    expected = codes.view(dtype).float()
    if dtype is torch.int8:
        expected[expected == -128] = torch.nan
    assert torch.equal(bits(values), bits(expected * 0.75))


def test_finite_values_stay_finite_and_others_do_not():
    values = difficult(64, 96)
    for dtype in FORMATS:
        back = torch.empty_like(values)
        _C.dequantize(back, _C.quantize(values, _format(dtype, 32)), _format(dtype, 32))
        assert torch.equal(back.isfinite(), values.isfinite())
        infinite = values.isinf() if dtype is torch.float8_e5m2 else torch.zeros_like(values).bool()
        assert torch.equal(back.isinf(), infinite)
