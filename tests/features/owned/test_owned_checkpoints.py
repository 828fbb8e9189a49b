"""Checkpoints of parameters that one rank owns."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.models import Stack, assert_same_gradients, batch_of, mean_square, shard
from support.owned_models import FULL, LOAD_FULL, in_blocks, muon_and_adam, train_on
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import distribute_tensor

from deepcompile_zero3 import MatrixOwners


def _built(seed, has_owners):
    torch.manual_seed(seed)
    model = Stack()
    owners = MatrixOwners(model, is_matrix=in_blocks)
    fn = owners if has_owners else None
    model, _ = shard(model, model.blocks, shard_placement_fn=fn)
    return model, muon_and_adam(model, owners)


def _save(folder, has_owners):
    model, optimizers = _built(1, has_owners)
    train_on(model, optimizers, batch_of(8, 8))
    values, states = get_state_dict(model, optimizers)
    dcp.save({"model": values, "optimizer": states}, checkpoint_id=folder)
    return _continued(model, optimizers)


def _load(folder, has_owners):
    model, optimizers = _built(2, has_owners)
    values, states = get_state_dict(model, optimizers)
    dcp.load({"model": values, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizers, model_state_dict=values, optim_state_dict=states)
    return _continued(model, optimizers)


def _continued(model, optimizers):
    """Returns the values now, and after an update by gradients that all numbers of ranks have."""
    before = copy.deepcopy(get_model_state_dict(model, options=FULL))
    for seed, (_, parameter) in enumerate(model.named_parameters()):
        gradient = batch_of(*parameter.shape, seed=seed)
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    for optimizer in optimizers:
        optimizer.step()
    return before, {n: p.full_tensor().detach() for n, p in model.named_parameters()}


@pytest.mark.more
@pytest.mark.smoke
def test_a_run_with_owners_goes_on_with_other_ranks_and_with_shards(run_ranks, tmp_path):
    of_owners, of_shards = tmp_path / "owners", tmp_path / "shards"
    saved, _ = run_ranks(2, _save, of_owners, True)
    for world_size in (4, 1):
        for loaded in run_ranks(world_size, _load, of_owners, True):
            torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    loaded, _ = run_ranks(2, _load, of_owners, False)
    torch.testing.assert_close(loaded[0], saved[0], rtol=0, atol=0)
    saved, _ = run_ranks(2, _save, of_shards, False)
    loaded, _ = run_ranks(2, _load, of_shards, True)
    torch.testing.assert_close(loaded[0], saved[0], rtol=0, atol=0)
    torch.testing.assert_close(loaded[1], saved[1], rtol=1e-2, atol=1e-3)  # torch splits matmuls


def _goes_back():
    """The states of an optimizer are loaded into itself, after a step and another."""
    model, optimizers = _built(1, has_owners=True)
    train_on(model, optimizers, batch_of(8, 8))
    state = copy.deepcopy(get_state_dict(model, optimizers))
    expected = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    train_on(model, optimizers, batch_of(8, 8, seed=1))
    assert not torch.equal(model.blocks[0].up.weight.full_tensor(), expected["blocks.0.up.weight"])
    set_state_dict(model, optimizers, model_state_dict=state[0], optim_state_dict=state[1])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    _, full = get_state_dict(model, optimizers, options=FULL)
    set_state_dict(model, optimizers, model_state_dict={}, optim_state_dict=full, options=LOAD_FULL)
    _, again = get_state_dict(model, optimizers, options=FULL)
    torch.testing.assert_close(again["state"], full["state"], rtol=0, atol=0)
    return full["state"]["blocks.0.up.weight"]["momentum_buffer"]


def test_an_optimizer_goes_back_to_its_own_state(run_ranks):
    first, second = run_ranks(2, _goes_back)
    assert first.norm() > 0
    assert torch.equal(first, second)


def _loaded_on_meta():
    with torch.device("meta"):
        model = Stack()
    owners = MatrixOwners(model, is_matrix=in_blocks)
    model, _ = shard(model, model.blocks, shard_placement_fn=owners)
    whole = Stack()
    state = whole.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=LOAD_FULL)
    mean_square(model, batch_of(2, 8)).backward()
    mean_square(whole, batch_of(2, 8)).backward()
    assert_same_gradients(model, whole)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name


def test_a_model_on_meta_takes_a_full_state(run_ranks):
    run_ranks(2, _loaded_on_meta)
