"""The sum of a digest on a CPU is exact modulo 2**64, in each of its loops and threads."""

import pytest
import torch

from deepcompile_zero3 import Zero3Error
from deepcompile_zero3.features.digests.element_sums import ElementSums
from deepcompile_zero3.runtime import _C


def _keys(size):
    return torch.randint(-(2**63), 2**63 - 1, (size,), dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 37), (9, 257), (6, 4099)])
def test_words_of_any_width_are_summed_exactly(dtype, rows, columns):
    limits = torch.iinfo(dtype)
    full = torch.randint(limits.min, limits.max + 1, (rows, columns + 3)).to(dtype)
    full[0, 0], full[-1, columns - 1] = limits.min, limits.max
    words = full[:, :columns]  # rows with others between
    row_keys, column_keys = _keys(rows), _keys(columns)

    # torch's products and sums of int64 wrap around too.
    expected = (words.long() * column_keys).sum(1).mul(row_keys).sum().item()

    assert _C.weighted_sum(words, row_keys, column_keys) == expected


def test_threads_do_not_change_the_sum():
    words = torch.randint(-(2**31), 2**31 - 1, (5000, 1030), dtype=torch.int32)
    row_keys, column_keys = _keys(5000), _keys(1030)
    threads = torch.get_num_threads()
    try:
        sums = []
        for count in (1, 3):
            torch.set_num_threads(count)
            sums.append(_C.weighted_sum(words, row_keys, column_keys))
    finally:
        torch.set_num_threads(threads)
    assert sums[0] == sums[1]


def test_operators_of_torch_give_the_same_sum():
    """A GPU computes with these."""
    words = torch.randint(-(2**15), 2**15, (70, 300), dtype=torch.int16)
    row_keys, column_keys = _keys(70), _keys(300)
    expected = _C.weighted_sum(words, row_keys, column_keys)
    assert ElementSums()._weighted_sum(words, row_keys, column_keys).item() == expected
    assert _C.weighted_sum(words, row_keys, column_keys) == expected  # keys are as they were


def test_keys_of_another_size_are_refused():
    with pytest.raises(Zero3Error, match=r"words \[2, 3\] .* do not fit keys \[2\] and \[4\]"):
        _C.weighted_sum(torch.ones(2, 3, dtype=torch.int32), _keys(2), _keys(4))
    with pytest.raises(Zero3Error, match="words are int8, int16 or int32"):
        _C.weighted_sum(torch.ones(2, 3), _keys(2), _keys(3))
