"""What graphs and callers may do with memory that ranks of one host share, and what they read."""

import time

import pytest
import torch
import torch.distributed as dist
from support.models import (
    INDUCTOR_TOO,
    assert_same_step,
    batch_of,
    compiled,
    compiled_each_way,
    each_way,
    mine,
    optimizers_of,
    shard,
)
from support.shared_memory import needs_shared_memory
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.sharding.module_parameters import parameters_of

pytestmark = needs_shared_memory


class _Edits(nn.Module):
    """A module that edits copies of its weights, in ways that compilers turn into writes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(64, 64).double() / 8)
        self.second = nn.Parameter(torch.randn(64, 64).double() / 8)

    def forward(self, x):
        hidden = (x @ self.second).sin()
        copy = self.second.clone()
        copy[5] = 2.0  # neither is changed after this
        put = self.first.index_put((torch.tensor([1, 3]),), torch.ones(2, 64).double())
        # The result has the weights' size, so that a compiler could reuse their memory.
        product = (hidden @ put @ copy).sin().cos() * 2
        return torch.relu(product @ copy).sigmoid() + product


def _edited(how):
    model, reference = shard(_Edits())
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        batch = batch_of(128, 64, seed=seed).double()
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("zero3", marks=pytest.mark.inductor),
        pytest.param("inductor", marks=INDUCTOR_TOO),
        "interpreted",
        "eager",
    ],
)
def test_graphs_write_to_copies(run_ranks, how):
    # Views are mapped read-only, so that a write would end the process.
    run_ranks(2, _edited, how)


class _Returns(nn.Module):
    """A module that returns its weight, a view of it, and what a compiler takes for the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        equal = self.weight * torch.ones_like(self.weight)
        return x @ self.weight, self.weight, self.weight.t()[1:3], equal


def _written_by_the_caller(how, grad):
    model, reference = shard(_Returns())
    run = compiled(model, how)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            _, *weights = run(torch.ones(2, 8))
            weights = [weight.detach() for weight in weights]
            expected = reference.weight.detach().clone()
            torch.testing.assert_close(weights, [expected, expected.t()[1:3], expected])
            for weight in weights:
                weight.add_(1)
    with torch.no_grad():
        torch.testing.assert_close(run(torch.ones(2, 8))[0], reference(torch.ones(2, 8))[0])


@compiled_each_way
@pytest.mark.parametrize("grad", [True, False])
def test_the_output_of_a_forward_is_the_callers(run_ranks, grad, how):
    run_ranks(2, _written_by_the_caller, how, grad)


class _Codes(nn.Module):
    """A module with a frozen 8-bit weight that is computed with in bfloat16."""

    def __init__(self):
        super().__init__()
        codes = torch.randn(1024, 1024).to(torch.float8_e4m3fn)
        self.codes = nn.Parameter(codes, requires_grad=False)

    def forward(self, x):
        return x @ self.codes.bfloat16()


def _large_and_quantized():
    model, reference = shard(_Codes(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = torch.eye(1024, dtype=torch.bfloat16)
    assert torch.equal(model(x), reference(x))


def test_a_large_quantized_parameter_is_published(run_ranks):
    run_ranks(2, _large_and_quantized)


def _scaled(transport, how):
    """Trains a float16 model whose gradients are divided by four."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(256, 256).half(), transport=transport)
    for parameter in parameters_of(model).values():
        parameter.settings = parameter.settings.replace(divide_factor=4)
    batch = batch_of(4, 256, seed=dist.get_rank()).half()
    compiled(model, how)(batch).sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def _scaled_alike():
    for how in ("interpreted", "eager"):
        ours, theirs = (_scaled(transport, how) for transport in ("shared_memory", "c10d"))
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-3)
        assert all(gradient.abs().max() > 0.1 for gradient in ours)


def test_float16_is_scaled_alike_over_either_transport(run_ranks):
    run_ranks(2, _scaled_alike)


def _kept_over_a_forward(how, transport):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model, reference = shard(layers, transport=transport)
    model.set_reshard_after_forward(False)
    run = compiled(model, how)
    batch = batch_of(4, 8).requires_grad_()
    loss = run(mine(batch)).square().mean()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().data.mul_(3)  # does not change the version
        run(mine(batch))
    loss.backward()
    reference(batch).square().mean().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


@each_way
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_a_kept_parameter_has_the_values_of_its_forward(run_ranks, how, transport):
    run_ranks(2, _kept_over_a_forward, how, transport)


class _Slow(nn.Module):
    """A model that sleeps between two layers on the last rank."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        _pause()
        return self.second(x)


@torch.compiler.disable
def _pause():
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.3)


def _evaluated_while_others_load(how):
    model, reference = shard(_Slow())
    run = compiled(model, how)
    batch = batch_of(4, 8)
    with torch.no_grad():
        for factor in (1.0, 2.0, -1.0):
            state = {name: value * factor for name, value in model.state_dict().items()}
            model.load_state_dict(state)
            reference.load_state_dict({n: v * factor for n, v in reference.state_dict().items()})
            for _ in range(2):
                torch.testing.assert_close(run(batch), reference(batch))


@pytest.mark.parametrize(
    ("how", "world_size"),
    [
        ("interpreted", 3),
        ("eager", 2),
        pytest.param("eager", 3, marks=pytest.mark.long),
        pytest.param("zero3", 3, marks=INDUCTOR_TOO),
    ],
)
@pytest.mark.more
def test_a_fast_rank_never_changes_what_a_slow_one_reads(run_ranks, how, world_size):
    run_ranks(world_size, _evaluated_while_others_load, how)
