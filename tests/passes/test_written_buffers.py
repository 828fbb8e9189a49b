"""A forward writes to a buffer and computes with it; backward computes with the same values."""

import torch
from support.models import (
    assert_same_step,
    batch_of,
    compiled,
    compiled_each_way,
    either_transport,
    shard,
)
from torch import nn
from torch._functorch import config as functorch_config


class _Counts(nn.Module):
    """Scales by buffers as they were before and after a write: [batch, 8] -> [batch, 8]."""

    in_place = True

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("mean", torch.arange(1.0, 9.0))

    def forward(self, x):
        y = self.linear(x)
        before = y * self.mean.view(2, 4).exp().flatten()
        with torch.no_grad():
            count = self.count + 1
            mean = self.mean.lerp(y.detach().mean(0).abs().clamp(max=1).round(), 0.5)
            if self.in_place:
                self.count.copy_(count)
                self.mean.copy_(mean)
            else:  # eager autograd refuses to save what is written to
                self.count, self.mean = count, mean
        return (before + self.mean.exp()) * y.tanh() * self.count


def _steps_are_those_of_the_whole_model(how, transport):
    torch.manual_seed(0)
    model, reference = shard(nn.Sequential(_Counts(), nn.Linear(8, 8)), transport=transport)
    reference[0].in_place = False
    run = compiled(model, how)
    for seed in range(2):
        batch = batch_of(1, 8, seed=seed).expand(4, 8)  # the buffers of all ranks are equal
        assert_same_step(model, reference, batch, run=run)
        for module in model, reference:
            module.zero_grad()
        buffers = zip(model.buffers(), reference.buffers(), strict=True)
        assert all(torch.allclose(ours, theirs) for ours, theirs in buffers)


@compiled_each_way
@either_transport
def test_backward_computes_with_buffers_as_forward_read_them(run_ranks, how, transport):
    run_ranks(2, _steps_are_those_of_the_whole_model, how, transport)


def _steps_that_save_little_are_those_of_the_whole_model():
    with functorch_config.patch(activation_memory_budget=0):
        _steps_are_those_of_the_whole_model("interpreted", "auto")


def test_backward_computes_with_buffers_as_forward_read_them_where_only_inputs_are_saved(run_ranks):
    run_ranks(2, _steps_that_save_little_are_those_of_the_whole_model)
