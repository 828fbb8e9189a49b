"""Ranks tell each other values as JSON, or codes in one exchange."""

import pytest
import torch.distributed as dist

from deepcompile_zero3 import Zero3Error
from deepcompile_zero3.transport.json_collectives import all_gather_codes, all_gather_json


def _codes_and_values():
    world, rank = dist.group.WORLD, dist.get_rank()
    largest = (1 << 24) - 1
    assert all_gather_codes("a call", rank or largest, None, world) == [largest, 1]
    said = all_gather_codes("a call", None if rank else 0, ["stopped", rank], world)
    assert said == [0, ["stopped", 1]]
    assert all_gather_codes("a call", None, rank, world) == [0, 1]
    assert all_gather_json("a call", "", world) == ["", ""]


def test_a_rank_says_a_code_or_a_value(run_ranks):
    run_ranks(2, _codes_and_values)


def _different_calls():
    world, rank = dist.group.WORLD, dist.get_rank()
    with pytest.raises(Zero3Error, match=r"different calls: call \d here, .*another step"):
        all_gather_codes(f"call {rank}", 3, None, world)
    what, code = ("a stream", 3) if rank else ("a save", None)
    with pytest.raises(Zero3Error, match="ranks make different calls"):
        all_gather_codes(what, code, "a longer value", world)


def test_a_code_of_another_call_is_an_error(run_ranks):
    run_ranks(2, _different_calls)
