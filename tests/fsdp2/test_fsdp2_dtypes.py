"""Scenarios of FSDP2's own tests: casts of a forward, of its recomputation and of gradients."""

import copy

import pytest
import torch
from support.job import needs_a_job
from support.mesh_models import either_way
from support.models import batch_of, compiled, each_way, mine
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import fully_shard, record_collectives


def _normalized(how):
    """Compares layers of all kinds in bfloat16, and a layer with its own casts, with FSDP2."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    own = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(output_dtype=torch.bfloat16)  # its statistics are not in bfloat16
    whole = Normalized()
    policies = {"last": own, "batch1d": mixed, "batch2d": mixed}
    results = []
    for sharding in (torch_fully_shard, fully_shard):
        model = copy.deepcopy(whole)
        for name, layer in model.named_children():
            sharding(layer, mp_policy=policies.get(name, low))
        sharding(model, mp_policy=low)
        run = compiled(model, how) if sharding is fully_shard else model
        output = run(mine(batch_of(4, 36)))
        output.square().mean().backward()
        grads = [parameter.grad.full_tensor() for parameter in model.parameters()]
        results.append([output, *grads, *model.buffers()])
        assert model.last.seen == (torch.float32, torch.float32)
    for theirs, ours in zip(*results, strict=True):
        assert_close(ours, theirs, rtol=3e-2, atol=3e-3)  # also checks the dtype


class Casting(nn.Linear):
    """A layer with a further input, which it casts itself."""

    def forward(self, x, y):
        self.seen = x.dtype, y.dtype
        return super().forward((x + y).to(self.weight.dtype))


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.batch2d = nn.BatchNorm2d(4)
        self.up = nn.Linear(64, 16)
        self.batch1d = nn.BatchNorm1d(16)
        self.layer = nn.LayerNorm(16)
        self.last = Casting(16, 4)

    def forward(self, x):
        x = self.batch2d(self.conv(x.view(-1, 1, 6, 6))).flatten(1)
        x = self.layer(self.batch1d(self.up(x)))
        return self.last(x.float(), torch.ones(16))


@each_way
def test_normalization_and_casts_of_ones_own_are_those_of_fsdp2(run_ranks, how):
    run_ranks(2, _normalized, how)


class Noting(nn.Linear):
    """A layer that records the dtypes of its inputs."""

    def forward(self, x):
        self.noted = [*getattr(self, "noted", ()), x.dtype]
        return super().forward(x)


class Rerun(nn.Module):
    """A module that recomputes a whole layer in backward."""

    def __init__(self):
        super().__init__()
        self.layer = Noting(8, 8)
        self.given = []

    def through(self, x):
        x = self.layer(x)
        self.given.append(x.dtype)
        return x

    def forward(self, x):
        return checkpoint(self.through, x, use_reentrant=False, early_stop=False).float().sum()


@needs_a_job
@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_recomputation_casts_as_the_forward_did(output_dtype):
    model = Rerun()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output_dtype)
    fully_shard(model.layer, mp_policy=policy)
    fully_shard(model)(batch_of(2, 8)).backward()
    assert model.layer.noted == 2 * [torch.bfloat16]
    assert model.given == 2 * [output_dtype]
    assert model.layer.weight.grad.dtype == torch.float32


class WithCodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.ones(8, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return self.linear(x) * self.codes


@needs_a_job
@either_way
def test_a_parameter_frozen_at_first_is_reduced_in_its_dtype_later(how):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(WithCodes(), mp_policy=policy).requires_grad_(False)
    run = compiled(model, how)
    with torch.no_grad():
        run(batch_of(2, 8))
    model.linear.requires_grad_(True)
    with record_collectives() as log:
        run(batch_of(2, 8)).sum().backward()
    assert {c.dtype for c in log if c.op == "reduce_scatter"} == {torch.float32}
    assert model.linear.weight.grad.dtype == torch.float32
    assert model.codes.grad is None
