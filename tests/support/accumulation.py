"""Shared parts of the tests of accumulated and deferred gradients."""

import torch
from torch import nn

ops = torch.ops.zero3


class Experts(nn.Module):
    """Uses its second layer only when asked to."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.late = nn.Parameter(torch.randn(8, 8))  # not used in autograd

    def forward(self, x, use_both=False):
        x = torch.tanh(self.first(x))
        return self.second(x) if use_both else x
