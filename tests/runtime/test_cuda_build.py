"""A runtime that was built for GPUs, on a machine that need not have one."""

import os
import re
from pathlib import Path

import pytest
import torch

from deepcompile_zero3.runtime import _C

OPERATORS = [
    "all_gather_start",
    "all_gather_wait",
    "all_gather_views",
    "reduce_grad",
    "reduce_mm",
    "reduce_rows",
    "unshard",
    "store_start",
    "store_wait",
    "load_start",
    "load_wait",
]
pytestmark = [
    pytest.mark.cuda_build,
    pytest.mark.skipif(not _C.WITH_CUDA, reason="the runtime was built without CUDA"),
]


@pytest.mark.parametrize("op", OPERATORS)
def test_each_operator_is_there_for_cuda(op):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"zero3::{op}", "CUDA")


def test_kernels_are_there_for_each_architecture_asked_for():
    wanted = re.findall(r"(\d+)\.(\d+)", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if not wanted:
        pytest.skip("TORCH_CUDA_ARCH_LIST names none")
    library = Path(_C.__file__).read_bytes()
    for major, minor in wanted:
        assert f"sm_{major}{minor}".encode() in library
