"""Tensors in a file: their space, and copies to it and back."""

import os

import pytest
import torch

from deepcompile_zero3 import Zero3Error
from deepcompile_zero3.runtime import _C, ops

MIB = 2**20


def test_a_store_takes_dense_tensors(tmp_path):
    tier = _C.FileTier(str(tmp_path))
    tensor = torch.randn(64, 64)
    stored = ops.store_wait(ops.store_start(tensor.t(), tier.number), tensor.t())
    assert _C.is_in_file(stored)
    assert stored.stride() == (1, 64)
    loaded = ops.load_wait(ops.load_start(stored), stored)
    assert not _C.is_in_file(loaded)
    assert torch.equal(loaded, tensor.t())
    assert tier.stats().read == tier.stats().written == tensor.nbytes
    with pytest.raises(Zero3Error, match=r"store_start takes a dense tensor, got sizes \[64, 32\]"):
        ops.store_start(tensor[:, :32], tier.number)
    with pytest.raises(Zero3Error, match="takes what zero3::store_start returned"):
        ops.store_wait(torch.zeros(1, dtype=torch.int64), tensor)
    with pytest.raises(Zero3Error, match="takes a tier for a tensor on the CPU"):
        ops.store_start(tensor)
    number = tier.number
    del tier, stored
    with pytest.raises(Zero3Error, match=f"offloads to tier {number}, which is gone"):
        ops.store_start(tensor, number)


def test_a_store_that_began_with_a_copy_begins_again(tmp_path):
    tier = _C.FileTier(str(tmp_path))
    tensor, copy = torch.ones(64, 64), torch.zeros(64, 64)
    stored = ops.store_wait(ops.store_start(copy, tier.number), tensor)
    assert torch.equal(stored, tensor)


def test_a_forked_process_has_no_part_in_the_file(tmp_path):
    tier = _C.FileTier(str(tmp_path))
    stored = tier.copy(torch.ones(64 * 1024))
    child = os.fork()
    if child == 0:
        try:
            tier.copy(torch.ones(4))
        except Zero3Error as error:
            os._exit(0 if "was forked from process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stored.sum() == 64 * 1024


def test_free_space_takes_tensors_of_other_sizes(tmp_path):
    tier = _C.FileTier(str(tmp_path))
    large = [tier.copy(torch.zeros(MIB // 4)) for _ in range(4)]
    assert tier.stats().file_bytes == 4 * MIB
    del large
    small = [tier.copy(torch.full((3000,), float(i))) for i in range(200)]  # three pages each
    assert tier.stats().file_bytes == 4 * MIB
    assert all((each == i).all() for i, each in enumerate(small))
    del small[::2]
    tier.copy(torch.zeros(3000))
    del small
    whole = tier.copy(torch.zeros(MIB))
    assert tier.stats().file_bytes == 4 * MIB
    assert tier.stats().in_use == whole.nbytes
