"""A profile may end while gathers, reductions and streams are under way."""

import pytest
import torch
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


def _gather():
    model, reference = shard(nn.Linear(512, 512), [], transport="c10d")
    with profile() as profiled:
        torch.ones(3) + 1
        model.unshard(async_op=True)
        model.reshard()  # drops the gather: the next one waits for it
    names = _names(profiled)
    del profiled
    blocks = _small_blocks()
    assert_same_step(model, reference, batch_of(2, 512))
    assert not any(map(any, blocks)), "memory of other objects was written to"
    return names


def _stream():
    model = sharded_stack()
    whole = full_values(model)
    with profile() as profiled:
        stream = stream_full_parameters(model, max_mb=SMALL, transport="c10d")
        name, first = next(stream)
        streamed = {name: first.clone()}
    names = _names(profiled)
    del profiled
    blocks = _small_blocks()
    streamed |= {name: full.clone() for name, full in stream}
    assert not any(map(any, blocks)), "memory of other objects was written to"
    torch.testing.assert_close(streamed, whole, rtol=0, atol=0)
    return names


@pytest.mark.parametrize("run", [_gather, _stream])
def test_a_profile_may_end_before_what_it_sees_begin(run_apart, run):
    for names in run_apart(run):
        assert "aten::empty" in names
        assert not names & {"gloo:send", "gloo:recv", "gloo:broadcast"}
