"""A model of experts, of which each rank may use others."""

import copy

import torch
from models import mean_square
from torch import nn

from deepcompile_zero3 import fully_shard


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
    model = Experts(width)
    return fully_shard(copy.deepcopy(model), **settings), model


def loss_of_all(reference, batch, choices):
    """Returns the mean of the ranks' losses, each with the rank's rows and choice."""
    parts = zip(batch.chunk(len(choices)), choices, strict=True)
    return sum(mean_square(lambda x, c=c: reference(x, c), rows) for rows, c in parts) / len(
        choices
    )
