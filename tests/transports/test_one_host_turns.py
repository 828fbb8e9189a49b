"""Ranks of one host share memory in which regathered copies take turns."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.models import (
    INDUCTOR_TOO,
    Block,
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    in_little_memory,
    mine,
    optimizers_of,
    shard,
)
from support.shared_memory import needs_shared_memory
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from deepcompile_zero3 import Zero3Error, fully_shard
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.sharding.module_parameters import parameters_of

pytestmark = needs_shared_memory

TIMEOUT = 3  # seconds; of a group whose ranks fail


def _trained(how, bucket_mb):
    blocks = nn.Sequential(*(Block(16) for _ in range(3)))
    model, reference = shard(blocks, reshard_after_forward=True)
    run = compiled(model, how, keep_mb=64, gather_bucket_mb=bucket_mb)
    optimizers = optimizers_of(model, reference)
    for seed in range(4):
        batch = batch_of(6, 16, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        with torch.no_grad():
            torch.testing.assert_close(run(batch), reference(batch))


# All at once, which exceeds the room, or a few at a time.
@pytest.mark.parametrize(
    ("how", "bucket_mb"),
    [
        ("interpreted", 64),
        ("interpreted", 0.003),
        ("eager", None),
        pytest.param("zero3", 64, marks=INDUCTOR_TOO),
        pytest.param("zero3", 0.003, marks=INDUCTOR_TOO),
    ],
)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_copies_that_take_turns_are_right(run_ranks, world_size, how, bucket_mb):
    run_ranks(world_size, in_little_memory, _trained, how, bucket_mb)


def _kept_all_the_same(width=32):
    model, reference = shard(Stack(width), reshard_after_forward=True)
    model.set_reshard_after_forward(False)  # memory stays as assigned
    run = compiled(model, "interpreted", keep_mb=64)
    batch = batch_of(4, width)
    loss = run(mine(batch)).square().mean()
    with torch.no_grad():
        run(mine(batch))  # all take turns in the place of kept copies
    loss.backward()
    reference(batch).square().mean().backward()
    assert_same_gradients(model, reference)


@pytest.mark.more
def test_a_kept_copy_moves_out_when_its_turn_is_over(run_ranks):
    run_ranks(2, in_little_memory, _kept_all_the_same)


def _gathered_on_one_rank():
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    mesh = DeviceMesh.from_group(group, "cpu")
    model, _ = shard(Stack(), mesh=mesh, reshard_after_forward=True)
    batch = mine(batch_of(4, 8))
    model(batch)
    if dist.get_rank() == 1:
        head = parameters_of(model.head)["weight"]
        ops.all_gather_start([head.placeholder])  # like a forward that then raises
    with pytest.raises(RuntimeError) as raised:
        model(batch)
    return str(raised.value)


def test_ranks_that_have_gathered_different_things_get_an_error(run_apart):
    messages = run_apart(in_little_memory, _gathered_on_one_rank)
    assert all(
        "ranks have gathered different things before '" in message for message in messages
    ), messages


def _waited_for_in_another_order():
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    for linear in model:
        fully_shard(linear, reshard_after_forward=True)
    parameters = [parameters_of(linear)["weight"] for linear in model]
    handles = [ops.all_gather_start([p.placeholder]) for p in parameters]
    last = ops.all_gather_views(handles[3], [parameters[3].placeholder])[0]  # no room for it
    before = last.clone()
    with pytest.raises(RuntimeError, match="waited for after others that were gathered later"):
        ops.all_gather_views(handles[0], [parameters[0].placeholder])
    dist.barrier()
    assert torch.equal(last, before)
    # There is always room in the order of the starts.
    for handle, parameter in zip(handles[1:3], parameters[1:3], strict=True):
        full = ops.all_gather_views(handle, [parameter.placeholder])[0]
        torch.testing.assert_close(full, parameter.shard.full_tensor())


def test_waits_in_another_order_overwrite_nothing(run_ranks):
    run_ranks(2, in_little_memory, _waited_for_in_another_order)


class _Mixed(nn.Module):
    """A module of several dtypes, strides and sizes, one with fewer rows than there are ranks."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(8, 40).double())
        self.strided = nn.Parameter(torch.randn(40, 24).t())
        self.row = nn.Parameter(torch.randn(1, 24).double())

    def forward(self, x):
        hidden = (x @ self.wide).float() @ self.strided.t()
        return hidden.double() * self.row


def _mixed(how):
    model, reference = shard(_Mixed(), reshard_after_forward=True)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        batch = batch_of(4, 8, seed=seed).double()
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@pytest.mark.parametrize("how", ["interpreted", "eager"])
def test_copies_of_all_kinds_take_turns(run_ranks, how):
    run_ranks(2, in_little_memory, _mixed, how)


def _different_settings():
    with pytest.raises(Zero3Error, match=r"reshard_after_forward=(True|False) on rank 1"):
        fully_shard(nn.Linear(8, 8), reshard_after_forward=dist.get_rank() == 0)


def test_ranks_that_ask_for_different_memory_get_an_error(run_ranks):
    run_ranks(2, _different_settings)


def _sharded_after_smaller_ones():
    """Shards a model that needs more memory than an earlier one; both take turns in new memory."""
    models = [shard(Stack(width), reshard_after_forward=True) for width in (8, 32)]
    for seed in range(2):
        for (model, reference), width in zip(models, (8, 32), strict=True):
            assert_same_step(model, reference, batch_of(4, width, seed=seed))


def test_a_larger_model_gets_a_larger_memory(run_ranks):
    run_ranks(2, in_little_memory, _sharded_after_smaller_ones)
