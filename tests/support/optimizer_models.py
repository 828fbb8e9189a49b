"""Equal models and their optimizers, of which the first steps DTensors by their dispatch."""

import copy

import torch
from support.models import Stack
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.features.optimizer_steps.local_tensors import ELEMENTWISE

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True),
    **{
        cls.__name__: cls
        for cls in ELEMENTWISE
        if cls not in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Rprop)
    },
}


class Scaled(nn.Module):
    """A stack with a scalar, and a parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.stack = Stack()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.stack(x) * self.scale


def two(make, mesh=None):
    """Returns equal models, their optimizers, and a plain parameter of each optimizer."""
    torch.manual_seed(0)
    model = Scaled()
    models = [fully_shard(copy.deepcopy(model), mesh=mesh) for _ in range(2)]
    # torch's foreach kernels take no DTensors together with plain tensors.
    plain = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [
        make([{"params": m.parameters()}, {"params": [p]}])
        for m, p in zip(models, plain, strict=True)
    ]
    step_by_dispatch(optimizers[0])
    return models, optimizers, plain


def step_by_dispatch(optimizer):
    """Makes the optimizer step DTensors, as it does where a hook looks on."""
    optimizer.register_step_pre_hook(lambda *_: None)


def assert_same(models, optimizers, plain):
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())
    assert torch.equal(*plain)
    states = [o.state_dict() for o in optimizers]
    assert [*states[0]["state"]] == [*states[1]["state"]]
    for ours, theirs in zip(*(s["state"].values() for s in states), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            other = theirs[key]
            assert type(value) is type(other), key
            if isinstance(value, DTensor):
                assert (value.placements, value.shape) == (other.placements, other.shape)
                value, other = value.to_local(), other.to_local()
            torch.testing.assert_close(value, other, rtol=0, atol=0)
