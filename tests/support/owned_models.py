"""Models whose matrices have owners."""

import torch
from support.models import mean_square, mine, shard, step
from torch.distributed.checkpoint.state_dict import StateDictOptions

from deepcompile_zero3 import MatrixOwners

FULL = StateDictOptions(full_state_dict=True)
LOAD_FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def in_blocks(name, parameter):
    return parameter.dim() == 2 and name.startswith("blocks")


def owned(model, mesh=None, **settings):
    """Returns ``model``, whose blocks' matrices have owners, an unsharded copy, and the owners."""
    owners = MatrixOwners(model, mesh, is_matrix=in_blocks)
    model, reference = shard(model, model.blocks, mesh=mesh, shard_placement_fn=owners, **settings)
    return model, reference, owners


def muon_and_adam(model, owners):
    matrices = [p for n, p in model.named_parameters() if n in owners.rank_of]
    others = [p for n, p in model.named_parameters() if n not in owners.rank_of]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)


def train_on(model, optimizers, batch):
    mean_square(model, mine(batch)).backward()
    step(optimizers)
