"""A model of experts, of which each rank may use others."""

import copy

import torch
import torch.distributed as dist
from support.models import (
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    mean_square,
    mine,
    optimizers_of,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.sharding.module_parameters import parameters_of

# The experts that each of two or four ranks uses in a step; no rank uses the last expert.
TWO = [((0, 1), (1,)), ((), (2, 0)), ((2,), (2,)), ((0,), ())]
THREE = [((0,), (1,), ()), ((0, 1, 2), (), (1, 2)), ((), (2,), ()), ((1,), (1,), (0, 2))]
FOUR = [((0,), (0,), (1,), ()), ((), (), (0, 2), (2, 0)), ((1,), (), (), ()), ((), (), (), ())]

# Of several forwards before a backward: those that each of two ranks uses in each.
SEVERAL = [
    [((0, 1), (1, 0))],
    [((1,), (1,)), ((1,), ())],
    [((1,), ()), ((), (1,))],
    [((0, 1), ()), ((0,), (2,)), ((), (0, 2))],
    TWO,
]


class Experts(nn.Module):
    """A model whose forward uses the given experts."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, width)

    def forward(self, x, chosen):
        x = self.first(x)
        for index in chosen:
            x = x + self.experts[index](x)
        return self.head(x)


def sharded(width=8, **settings):
    torch.manual_seed(0)
    reference = Experts(width)
    model = fully_shard(copy.deepcopy(reference), **settings)
    model.set_reduce_scatter_unused_params(True)  # no effect over gloo
    return model, reference


def loss_of_all(reference, batch, choices):
    """Returns the mean of the ranks' losses, each with the rank's rows and choice."""
    parts = zip(batch.chunk(len(choices)), choices, strict=True)
    return sum(mean_square(lambda x, c=c: reference(x, c), rows) for rows, c in parts) / len(
        choices
    )


def train_experts(steps, width, transport, micro_batches, mesh_shape, bucket_bytes=64 << 20):
    mesh = init_device_mesh("cpu", mesh_shape)
    model, reference = sharded(width, transport=transport, mesh=mesh)
    for module in model.modules():
        for parameter in parameters_of(module).values():
            parameter.settings = parameter.settings.replace(bucket_bytes=bucket_bytes)
    optimizers = optimizers_of(model, reference)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(0, len(steps), micro_batches):
        for index in range(step, step + micro_batches):
            choices = steps[index]
            batch = batch_of(2 * world_size, width, seed=index)
            model.set_requires_gradient_sync(index == step + micro_batches - 1)
            mean_square(lambda x, c=choices[rank]: model(x, c), mine(batch)).backward()
            loss_of_all(reference, batch, choices).backward()
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, reference)
    assert model.experts[3].weight.grad is None


def train_in_several_forwards(steps, width, transport, mesh_shape, backwards):
    """Runs several forwards in each step, and then ``backwards`` of their graph."""
    mesh = init_device_mesh("cpu", mesh_shape)
    model, reference = sharded(width, transport=transport, mesh=mesh)
    optimizers = optimizers_of(model, reference)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for seed, forwards in enumerate(steps):
        loss = expected = 0
        for index, choices in enumerate(forwards):
            batch = batch_of(2 * world_size, width, seed=10 * seed + index)
            loss += mean_square(lambda x, c=choices[rank]: model(x, c), mine(batch))
            expected += loss_of_all(reference, batch, choices)
        for retains in [True] * (backwards - 1) + [False]:
            loss.backward(retain_graph=retains)
            expected.backward(retain_graph=retains)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference)
