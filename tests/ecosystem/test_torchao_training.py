"""torchao's quantized training: weights that are subclasses with FSDP2's all-gather extensions."""

import copy

import pytest
import torch
from support.models import batch_of, compiled, each_way, either_transport, mine
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import fully_shard

training = pytest.importorskip("torchao.prototype.quantized_training")
KINDS = ("int8_weight_only_quantized_training", "int8_mixed_precision_training")


def _trains(how, kind):
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    quantize_(model, getattr(training, kind)())
    reference = copy.deepcopy(model)
    batch = batch_of(8, 64)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    run = compiled(model, how)

    output = run(mine(batch))
    output.sum().backward()

    expected = reference(mine(batch))  # each row is quantized by itself
    torch.testing.assert_close(output, expected)
    reference(batch).sum().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(sharded.grad, DTensor)
        gradient = sharded.grad.full_tensor() * torch.distributed.get_world_size()  # of means
        difference = (gradient - whole.grad).norm() / whole.grad.norm()
        # Mixed precision quantizes the gradients of each rank's rows together.
        assert difference < (1e-5 if "weight_only" in kind else 0.1)


@each_way
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thin
def test_int8_training(run_ranks, how, kind):
    run_ranks(2, _trains, how, kind, timeout=300)


def _trains_in_float8(how, transport):
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    reference = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        fully_shard(layer, transport=transport)
    fully_shard(model, transport=transport)
    run = compiled(model, how, fullgraph=how != "eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(4):
            batch = batch_of(8, 32, seed=seed)
            run(mine(batch)).square().mean().backward()
            reference(batch).square().mean().backward()
            for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
                difference = sharded.grad.full_tensor() - whole.grad
                assert difference.norm() < 0.1 * whole.grad.norm()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if seed > 0:  # the first two forwards compute scales themselves
                precompute_float8_dynamic_scale_for_fsdp(model)


@each_way
@either_transport
def test_scales_may_be_computed_ahead_of_a_forward(run_ranks, how, transport):
    run_ranks(2, _trains_in_float8, how, transport)
