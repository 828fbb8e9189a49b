"""Parameters that are gathered as other tensors: FSDP2's all-gather extensions."""

import copy

import pytest
import torch
from extensions import Bf16Gathered, Int8Gathered, wrap
from models import (
    assert_same_gradients,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
)
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import fully_shard, record_collectives


def _bf16_linear(rows, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, rows), nn.Tanh(), nn.Linear(rows, 8)).to(dtype)


def _reads_bf16(how, rows, transport, reshard_after_forward):
    model = _bf16_linear(rows)
    for layer in (model[0], model[2]):
        layer.bias = None
    reference = copy.deepcopy(model)
    wrap(model, Bf16Gathered)
    for layer in (model[0], model[2]):
        fully_shard(layer, transport=transport, reshard_after_forward=reshard_after_forward)
    fully_shard(model, transport=transport)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert isinstance(model[0].weight.to_local(), Bf16Gathered)
    run = compiled(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for seed in range(3):
        batch = batch_of(4, 8, seed=seed).bfloat16()
        rounded = copy.deepcopy(reference).bfloat16()
        with record_collectives() as log:
            mean_square(run, mine(batch)).backward()
        mean_square(rounded, batch).backward()
        for parameter, whole in zip(reference.parameters(), rounded.parameters(), strict=True):
            parameter.grad = whole.grad.float()
        assert_same_gradients(model, reference, 2e-2)
        assert {c.dtype for c in log if c.op == "all_gather"} == {torch.bfloat16}
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()


@each_way
@either_transport
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.thin
def test_a_parameter_gathered_in_bf16(run_ranks, how, rows, transport, reshard_after_forward):
    run_ranks(2, _reads_bf16, how, rows, transport, reshard_after_forward, timeout=300)


def _reads_int8(how, transport):
    """Two payloads, and metadata with a tensor that changes from step to step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
    whole = [model[i].weight.detach().clone() for i in (0, 2)]
    wrap(model, Int8Gathered)
    fully_shard(model[0], transport=transport)
    fully_shard(model, transport=transport)
    run = compiled(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        Int8Gathered.factor = torch.tensor(1.0 + step)
        x = batch_of(4, 16, seed=step).requires_grad_()
        read = [_read_int8(weight) for weight in whole]
        values = {"0.weight": read[0], "2.weight": read[1]}
        values = {name: nn.Parameter(value) for name, value in values.items()}
        values |= {n: p.full_tensor() for n, p in model.named_parameters() if "bias" in n}
        plain = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
        expected = torch.func.functional_call(plain, values, (x,))
        actual = run(x)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        actual.square().mean().backward()
        expected.square().mean().backward()
        for weight, name in zip(whole, ("0.weight", "2.weight"), strict=True):
            grad = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(grad, values[name].grad, atol=1e-5, rtol=1e-5)
            weight.sub_(0.5 * grad)
        optimizer.step()
        optimizer.zero_grad()
    shards = [model.get_parameter(name).to_local().inner for name in ("0.weight", "2.weight")]
    for shard, weight in zip(shards, whole, strict=True):
        rows = weight.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
        torch.testing.assert_close(shard, rows, atol=1e-5, rtol=1e-5)


def _read_int8(weight):
    parts = []
    for rows in weight.chunk(torch.distributed.get_world_size()):
        scale = rows.abs().amax().clamp_min(1e-12) / 127
        parts.append((rows / scale).round() * scale * Int8Gathered.factor)
    return torch.cat(parts)


@each_way
@either_transport
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.thin
def test_two_payloads_and_changing_metadata(run_ranks, world_size, how, transport):
    run_ranks(world_size, _reads_int8, how, transport, timeout=300)
