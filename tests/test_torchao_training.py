"""torchao's quantized training: weights that are subclasses with FSDP2's all-gather extensions."""

import copy

import pytest
import torch
from models import batch_of, compiled, each_way, mine
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
