"""Ranks of one host share memory, in which copies that are gathered again take turns."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import (
    Block,
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    mine,
    optimizers_of,
    shard,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from deepcompile_zero3 import Zero3Error, fully_shard, one_host
from deepcompile_zero3.module import parameters_of
from deepcompile_zero3.runtime import ops

pytestmark = pytest.mark.skipif(
    os.environ.get("ZERO3_TRANSPORT") == "c10d", reason="ranks are told to exchange messages"
)

TIMEOUT = 3  # seconds, of a group whose ranks fail


def _in_little_memory(function, *args):
    """``function(*args)``, whose copies take turns in twice the largest."""
    before, one_host.RING_BYTES = one_host.RING_BYTES, 0
    try:
        return function(*args)
    finally:
        one_host.RING_BYTES = before


def _trained(how, bucket_mb):
    blocks = nn.Sequential(*(Block(16) for _ in range(3)))
    model, reference = shard(blocks, reshard_after_forward=True)
    run = model
    if how == "zero3":
        run = torch.compile(model, backend="zero3", options={"gather_bucket_mb": bucket_mb})
    optimizers = optimizers_of(model, reference)
    for seed in range(4):
        batch = batch_of(6, 16, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        with torch.no_grad():
            torch.testing.assert_close(run(batch), reference(batch))


# All at once, for which there is no room, or a few at a time.
@pytest.mark.parametrize(("how", "bucket_mb"), [("zero3", 64), ("zero3", 0.003), ("eager", None)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_copies_that_take_turns_are_right(run_ranks, world_size, how, bucket_mb):
    run_ranks(world_size, _in_little_memory, _trained, how, bucket_mb)


def _kept_all_the_same():
    model, reference = shard(Stack(), reshard_after_forward=True)
    model.set_reshard_after_forward(False)  # memory stays as it was given
    run = torch.compile(model, backend="zero3")
    batch = batch_of(4, 8)
    loss = run(mine(batch)).square().mean()
    with torch.no_grad():
        run(mine(batch))  # all have turns in the place of what was kept
    loss.backward()
    reference(batch).square().mean().backward()
    assert_same_gradients(model, reference)


def test_what_is_kept_moves_out_when_its_turn_is_over(run_ranks):
    run_ranks(2, _in_little_memory, _kept_all_the_same)


def _gathered_on_one_rank():
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    mesh = DeviceMesh.from_group(group, "cpu")
    model, _ = shard(Stack(), mesh=mesh, reshard_after_forward=True)
    batch = mine(batch_of(4, 8))
    model(batch)
    if dist.get_rank() == 1:
        head = parameters_of(model.head)["weight"]
        ops.all_gather_start([head.placeholder], [head.fqn])  # and then it raises
    with pytest.raises(RuntimeError) as raised:
        model(batch)
    return str(raised.value)


def test_ranks_that_have_gathered_different_things_are_told(run_apart):
    messages = run_apart(_in_little_memory, _gathered_on_one_rank)
    assert any(
        "ranks have gathered different parameters before 'blocks.0" in message
        for message in messages
    ), messages


def _different_settings():
    with pytest.raises(Zero3Error, match=r"gathered again in backward on rank|kept on rank"):
        fully_shard(nn.Linear(8, 8), reshard_after_forward=dist.get_rank() == 0)


def test_ranks_that_ask_for_different_memory_are_told(run_ranks):
    run_ranks(2, _different_settings)


def _sharded_after_smaller_ones():
    """The ring of the first is too small for the second; both are used on."""
    models = [shard(Stack(width), reshard_after_forward=True) for width in (8, 32)]
    for seed in range(2):
        for (model, reference), width in zip(models, (8, 32), strict=True):
            assert_same_step(model, reference, batch_of(4, width, seed=seed))


def test_a_larger_model_gets_a_larger_memory(run_ranks):
    run_ranks(2, _in_little_memory, _sharded_after_smaller_ones)
