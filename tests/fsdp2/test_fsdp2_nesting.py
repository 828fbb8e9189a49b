"""Scenarios of FSDP2's own tests about where sharded modules are in each other."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    optimizers_of,
    shard,
    step,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from deepcompile_zero3 import Zero3Module, fully_shard, register_fsdp_forward_method


class Encoder(nn.Module):
    """A module that is called by another method than forward."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)

    def forward(self, x):
        raise NotImplementedError

    def encode(self, x):
        return self.conv(x.unsqueeze(1)).sum(-1)


class Mostly(nn.Module):
    """An unsharded module of sharded modules that prefetches one of them."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.plain = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        if isinstance(self.blocks[0], Zero3Module):
            self.blocks[0].unshard(async_op=True)
        x = self.plain(self.encoder.encode(x)) * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def _partly_sharded(how):
    model = Mostly()
    reference = copy.deepcopy(model)
    for module in (model.encoder, *model.blocks):
        fully_shard(module)
        gc.collect()
    register_fsdp_forward_method(model.encoder, "encode")
    model.scale = nn.Parameter(torch.ones(8))  # added late, not sharded
    reference.scale = nn.Parameter(torch.ones(8))
    run = compiled(model, how)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, foreach=False) for m in (model, reference)]
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert isinstance(ours, DTensor) == ("encoder" in name or "blocks" in name), name
            if not isinstance(ours, DTensor):  # not reduced
                dist.all_reduce(ours.grad)
                ours.grad /= dist.get_world_size()
            grad = ours.grad.full_tensor() if isinstance(ours, DTensor) else ours.grad
            assert_close(grad, theirs.grad, msg=name)
        step(optimizers)
    assert_close(run(batch), reference(batch))


@pytest.mark.first(how="eager")
@each_way
def test_sharded_modules_may_be_in_one_that_is_not(run_ranks, how):
    run_ranks(2, _partly_sharded, how)


def _whole_then_block(how):
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks)
    run, block = compiled(model, how), compiled(model.blocks[0], how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        mean_square(block, mine(batch)).backward()
        mean_square(reference.blocks[0], batch).backward()
        assert_same_gradients(model, reference)
        step(optimizers)
    assert_close(run(batch), reference(batch))


@pytest.mark.first(how="interpreted")
@each_way
def test_the_whole_and_a_block_of_it_may_take_steps_in_turn(run_ranks, how):
    run_ranks(2, _whole_then_block, how)


@needs_a_job
def test_a_slice_of_a_sharded_sequential_is_a_plain_one():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    part = model[:2]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]
    part(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[2].weight.grad is None


@needs_a_job
def test_a_model_without_parameters_of_its_own_can_be_unsharded():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for module in (*model, model):
        fully_shard(module)
    model.unshard(async_op=True).wait()
    assert isinstance(model[0].weight, DTensor)
    model.reshard()
    model(torch.ones(2, 4)).sum().backward()
