"""A forward returns a tensor subclass, whose gradient reaches the graph as its inner tensors."""

import torch
from support.models import assert_same_step, compiled, each_way, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

WIDTH = 4


class _Jagged(nn.Module):
    """Applies a layer to sequences of two and more rows: [rows, 4] -> jagged [2, *, 4]."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        offsets = torch.tensor([0, 2, x.shape[0]])
        return self.layer(torch.nested.nested_tensor_from_jagged(x, offsets))


class _Replicated(nn.Module):
    """Returns a DTensor beside a tensor: [rows, 4] -> [rows, 4], [rows, 4]."""

    def __init__(self, mesh):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mesh = mesh

    def forward(self, x):
        y = self.layer(x)
        return DTensor.from_local(y.tanh(), self.mesh, [Replicate()], run_check=False), y


def _train_as_one_process(kind, how):
    torch.manual_seed(0)
    if kind == "jagged":
        model, reference = shard(_Jagged())

        def loss(model, x):
            return model(x).values().square().mean()
    else:
        mesh = init_device_mesh("cpu", (2,))
        model = _Replicated(None)
        model, reference = shard(model)
        model.mesh = reference.mesh = mesh

        def loss(model, x):
            replicated, local = model(x)
            return replicated.to_local().square().mean() + local.mean()

    run = compiled(model, how)
    batch = torch.arange(8 * WIDTH).reshape(8, WIDTH).sin()
    assert_same_step(model, reference, batch, run=run, loss=loss)


@each_way
def test_a_forward_may_return_a_jagged_tensor(run_ranks, how):
    run_ranks(2, _train_as_one_process, "jagged", how)


@each_way
def test_a_forward_may_return_a_dtensor(run_ranks, how):
    run_ranks(2, _train_as_one_process, "dtensor", how)
