"""What the blocks of the documents find: a small model with the names of transformers' models."""

import functools
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import deepcompile_zero3
from deepcompile_zero3 import fully_shard

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class _Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.model = _Body()
        self.lm_head = nn.Linear(WIDTH, 16)

    config = SimpleNamespace(save_pretrained=lambda folder: None)
    layers = blocks = property(lambda self: self.model.layers)
    head = property(lambda self: self.lm_head)

    def embed(self, input_ids):
        return self.embedding(input_ids)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        loss = F.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss)


def compiled(model):
    return torch.compile(model, backend="zero3", options={"inductor": False})


def names(is_sharded, folder):
    """Returns the names that a block finds, with a new model."""
    torch.manual_seed(0)
    model = Model()
    if is_sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    text = torch.randint(16, (2, 3))
    batch = {"input_ids": text, "labels": text}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    return {
        **{name: getattr(deepcompile_zero3, name) for name in deepcompile_zero3.__all__},
        **{module.__name__: module for module in (torch, os, deepcompile_zero3)},
        "explain": functools.partial(deepcompile_zero3.explain, options={"inductor": False}),
        **{"nn": nn, "F": F, "dist": dist, "Shard": Shard},
        **{each.__name__: each for each in (parallelize_module, ColwiseParallel, RowwiseParallel)},
        "distribute_tensor": distribute_tensor,
        "init_device_mesh": init_device_mesh,
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "model": model,
        "build": Model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "step": compiled(model) if is_sharded else None,
        "loss_of": lambda model, batch: model(**batch).loss,
        **{"text": text, "batch": batch, "batches": [batch], "micro_batches": [batch, batch]},
        **{"folder": str(folder), "seed": 0, "steps_of_checkpoint": 0},
        "engine": SimpleNamespace(load_weights=list),
    }
