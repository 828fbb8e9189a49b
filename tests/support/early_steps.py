"""Models with two optimizers, of which one steps in backward."""

import copy

import torch
from support.models import Stack
from support.owned_models import in_blocks

from deepcompile_zero3 import MatrixOwners, Muon, fully_shard, step_in_backward

ONE_KIB = 1 / 1024  # each parameter has a bucket of its own

OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.01),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "muon": lambda m: Muon([p for p in m.parameters() if hasattr(p.device_mesh, "owner")]),
}


def plain_and_early(optimizer, mesh=None, depth=2, **settings):
    """Returns two equal sharded models and their optimizers, of which the second steps early."""
    torch.manual_seed(0)
    whole = Stack(width=16, depth=depth)
    models, optimizers = [], []
    for _ in range(2):
        model = copy.deepcopy(whole)
        owners = MatrixOwners(model, mesh, is_matrix=in_blocks) if optimizer == "muon" else None
        for block in model.blocks:
            fully_shard(block, mesh=mesh, shard_placement_fn=owners, **settings)
        models.append(fully_shard(model, mesh=mesh, shard_placement_fn=owners, **settings))
        optimizers.append(OPTIMIZERS[optimizer](model))
    step_in_backward(models[1], optimizers[1], bucket_mb=ONE_KIB)
    return models, optimizers


def assert_same_bits(models):
    for (name, ours), theirs in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor()), name
