"""Copies that cast and divide, on a CPU and, if there is one, on a GPU."""

import itertools

import pytest
import torch

from deepcompile_zero3.runtime import _C

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not (torch.cuda.is_available() and _C.WITH_CUDA):
        pytest.skip("there is no GPU, or the runtime was built without CUDA")
    return request.param


def _expected(source, to, through, divisor):
    if source is None:
        return torch.zeros_like(to)
    wide = torch.promote_types(torch.promote_types(through, to.dtype), torch.float32)
    quotient = source.cpu().to(through).to(wide) / divisor  # a GPU would multiply by 1 / divisor
    return quotient.to(to.dtype).to(to.device)


@pytest.mark.parametrize("divisor", [1, 4, 3])
def test_copies_are_cast_through_a_dtype_and_divided(device, divisor):
    torch.manual_seed(0)
    for from_dtype, through, to_dtype in itertools.product(DTYPES, repeat=3):
        sources = [
            torch.randn(3, 5, dtype=torch.float64).to(from_dtype).to(device),
            torch.randn(7, 4, dtype=torch.float64).to(from_dtype).to(device).t(),
            torch.randn(70_001, dtype=torch.float64).to(from_dtype).to(device)[1:],
            torch.randn(70_000, dtype=torch.float64).to(from_dtype).to(device),  # aligned
            None,
            torch.empty(0, dtype=from_dtype, device=device),
        ]
        sizes = [(3, 5), (4, 7), (70_000,), (70_000,), (11,), (0,)]
        targets = [torch.full(size, torch.nan, dtype=to_dtype, device=device) for size in sizes]
        _C.copy_all(targets, sources, through, divisor)
        for to, source in zip(targets, sources, strict=True):
            expected = _expected(source, to, through, divisor)
            if divisor == 1 or through == to_dtype:
                assert torch.equal(to, expected)
            else:  # a CPU rounds the quotient to `through` once more
                low = min(through, to_dtype, key=lambda dtype: -torch.finfo(dtype).eps)
                torch.testing.assert_close(to.to(low), expected.to(low))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [128, 129, 1024, 2100])
def test_copies_fill_launches(device, count):
    if device == "cpu":
        pytest.skip("a CPU launches nothing")
    sizes = [70_000 if n % 100 == 0 else n % 50 + 1 for n in range(count)]
    sources = [torch.randn(size, device=device) for size in sizes]
    targets = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]
    _C.copy_all(targets, sources, torch.float32, 2)
    for to, source in zip(targets, sources, strict=True):
        assert torch.equal(to, (source / 2).bfloat16())


def test_small_copies_negate_and_conjugate_what_is_so_when_read():
    values = torch.randn(3, 4)
    target = torch.empty(3, 4)
    _C.copy_all([target], [torch._neg_view(values)], torch.float32, 1)
    assert torch.equal(target, -values)

    values = torch.randn(3, 4, dtype=torch.complex64)
    target = torch.empty_like(values)
    _C.copy_all([target], [values.conj()], torch.complex64, 1)
    assert torch.equal(target, values.conj())
