"""A profile may end while gathers and streams are under way."""

import pytest
import torch
import torch.distributed as dist
from support.models import assert_same_step, batch_of, shard
from support.streams import SMALL, full_values, sharded_stack
from torch import nn
from torch.profiler import profile

from deepcompile_zero3 import stream_full_parameters


def _names(profiled):
    return {event.name.partition(" ")[0] for event in profiled.events()}


def _small_blocks():
    """Returns zeroed memory that the profile has freed, as far as malloc takes it again."""
    return [bytearray(nbytes) for nbytes in range(520, 1000, 40) for _ in range(4000)]


def _assert_zero(blocks):
    assert not any(block.strip(b"\0") for block in blocks), "memory of others was written to"


def _gather():
    model, reference = shard(nn.Linear(512, 512), [], transport="c10d")
    with profile() as profiled:
        model.unshard(async_op=True)
        model.reshard()  # drops the gather: the next one waits for it
    names = _names(profiled)
    assert "zero3::all_gather" in names
    assert not any(name.startswith("gloo:") for name in names)
    del profiled
    blocks = _small_blocks()
    assert_same_step(model, reference, batch_of(2, 512))
    _assert_zero(blocks)


def _stream(to):
    model = sharded_stack()
    whole = full_values(model)
    with profile() as profiled:
        stream = stream_full_parameters(model, max_mb=SMALL, transport="c10d", to=to)
        name, first = next(stream)
        streamed = {name: None if first is None else first.clone()}
    names = _names(profiled)
    assert "aten::empty" in names
    assert not names & {"gloo:send", "gloo:recv", "gloo:broadcast"}
    del profiled
    blocks = _small_blocks()
    streamed |= {name: None if full is None else full.clone() for name, full in stream}
    _assert_zero(blocks)
    if to == "all" or dist.get_rank() == to:
        torch.testing.assert_close(streamed, whole, rtol=0, atol=0)
    else:
        assert streamed == dict.fromkeys(whole)


@pytest.mark.parametrize("what", [(_gather,), (_stream, "all"), (_stream, 0)])
def test_a_profile_may_end_before_what_it_sees_begin(run_apart, what):
    run_apart(*what)
