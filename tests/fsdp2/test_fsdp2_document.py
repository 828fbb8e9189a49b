"""Rows of docs/fsdp2.md name tests that exist, and each argument and method of FSDP2 has one."""

import inspect
import re

import pytest
from support import documents
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

ROWS = documents.rows_of("fsdp2.md")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_of_the_document_names_the_tests_that_hold_it(row):
    _, verdict, tests = row
    assert verdict.split()[0].strip(",:;") in ("same", "likewise", "different", "refused")
    documents.assert_tests_exist(tests)


def test_the_document_has_a_row_for_each_argument_and_method_of_fsdp2():
    names = {name for name in vars(FSDPModule) if not name.startswith("_")}
    names |= set(inspect.signature(torch_fully_shard).parameters)
    documented = {name for row in ROWS for name in re.findall(r"`(\w+)", row[0])}
    assert names - documented == set()
