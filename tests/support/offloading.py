"""Models that are trained with a ``FileOffloadPolicy``, for tests."""

import torch
from support.models import Stack, batch_of, compiled, mean_square, mine
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import fully_shard, offload_optimizer, step_in_backward, step_locally

WIDTH, DEPTH, ROWS = 256, 3, 256  # an activation [ROWS, WIDTH] takes 256 KiB, and may go
MIB = 2**20


def shard(policy, depth=DEPTH, **settings):
    torch.manual_seed(0)
    model = Stack(width=WIDTH, depth=depth)
    if policy is not None:
        settings["offload_policy"] = policy
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def train(policy, how, steps=3, stepping="plain", **settings):
    """Returns the model, its optimizer and the losses of some steps."""
    model = shard(policy, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if stepping == "locally":
        step_locally(optimizer)
    if policy is not None:
        offload_optimizer(model, optimizer, part_mb=0.5)
    if stepping == "in backward":
        step_in_backward(model, optimizer, bucket_mb=0.5)
    run = compiled(model, how)
    losses = []
    for seed in range(steps):
        loss = mean_square(run, mine(batch_of(2 * ROWS, WIDTH, seed=seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses


def tensors_of(model, optimizer):
    """Returns the local tensors of shards, and of states that have their size."""
    shards = [parameter.to_local() for parameter in model.parameters()]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return shards, [value.to_local() for value in states if isinstance(value, DTensor)]
