"""``shard_placement_fn``: shards of any dimension of a parameter."""

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.mesh_models import assert_same_step, replicas
from support.models import INDUCTOR_TOO, batch_of, compiled, optimizers_of, shard
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from deepcompile_zero3 import fully_shard

PLACEMENTS = {  # by shape; biases keep the default
    (16, 8): Shard(1),
    (6, 16): None,
    (4, 6): Shard(-1),  # two ranks have two of six, one has none
    (5, 1, 2, 2): Shard(3),
}


def _placed(how, number):
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 4)]
    model = nn.Sequential(*layers, nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 5, 2), nn.Flatten())
    model, reference = shard(
        model,
        mesh=None if number is None else replicas(number),
        shard_placement_fn=lambda parameter: PLACEMENTS.get(tuple(parameter.shape)),
    )
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    ranks = dist.get_world_size() // (number or 1)
    for name, whole in reference.named_parameters():
        assert torch.equal(state[name], whole), name
        placement = PLACEMENTS.get(tuple(whole.shape)) or Shard(0)
        dim = placement.dim % whole.dim()
        parameter = model.get_parameter(name)
        assert parameter.placements[-1] == Shard(dim), name
        assert parameter.stride() == whole.stride(), name
        chunks = [*whole.chunk(ranks, dim), *[whole.narrow(dim, 0, 0)] * ranks]
        assert torch.equal(parameter.to_local(), chunks[dist.get_rank() % ranks]), name
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(8, 8, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)


@pytest.mark.thin
@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("interpreted", None),
        ("eager", None),
        ("interpreted", 2),
        ("eager", 2),
        pytest.param("zero3", None, marks=INDUCTOR_TOO),
    ],
)
def test_any_dimension_may_be_sharded(run_ranks, how, number):
    run_ranks(4, _placed, how, number)


@needs_a_job
@pytest.mark.parametrize(
    ("placement", "error", "message"),
    [
        (Shard(2), ValueError, r"Shard\(dim=2\)|S\(2\)"),
        (Shard(-3), ValueError, r"Shard\(dim=-3\)|S\(-3\)"),
        (Replicate(), TypeError, r"Replicate\(\)|R"),
        (1, TypeError, "1"),
    ],
    ids=str,
)
def test_objects_that_are_no_dimension_of_a_parameter_are_refused(placement, error, message):
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(error, match=f"shard_placement_fn gave ({message}) for '0.weight'"):
        fully_shard(model, shard_placement_fn=lambda parameter: placement)
    assert type(model[0]) is nn.Linear
    assert type(fully_shard(model)[0].weight) is not nn.Parameter
