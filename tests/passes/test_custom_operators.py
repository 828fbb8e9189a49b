"""Operators of the user's own on weights: what they draw forward, backward computes with too."""

import torch
from support.models import compiled, each_way, either_transport, relative_difference, shard
from torch import library, nn


@library.custom_op("zero3_tests::stochastic_round", mutates_args=())
def _stochastic_round(weight: torch.Tensor) -> torch.Tensor:
    return (weight * 4 + torch.rand_like(weight)).floor() / 4


@_stochastic_round.register_fake
def _(weight):
    return torch.empty_like(weight)


_stochastic_round.register_autograd(lambda ctx, grad: grad)


class _Rounded(nn.Module):
    """Computes with a rounded weight: [batch, 8] -> [batch, 8]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ _stochastic_round(self.weight)


def _both_directions_compute_with_one_sample(how, transport):
    model, _ = shard(nn.Sequential(_Rounded(), nn.Tanh()), transport=transport)
    x = torch.eye(8, requires_grad=True)
    sample = compiled(model, how)(x)
    torch.manual_seed(1)  # a sample of backward would be another one
    grad = torch.randn(8, 8)
    sample.backward(grad)
    weight = sample.detach().atanh()
    expected = (grad * (1 - sample.detach().square())) @ weight.T
    assert relative_difference(x.grad, expected) < 1e-3


@each_way
@either_transport
def test_forward_and_backward_compute_with_one_sample_of_an_untagged_operator(
    run_ranks, how, transport
):
    run_ranks(2, _both_directions_compute_with_one_sample, how, transport)
