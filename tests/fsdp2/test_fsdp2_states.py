"""Scenarios of FSDP2's own tests: when things are gathered, optimizers and states."""

import copy

import pytest
import torch
from support.fsdp2_scenarios import Recomputing, gathered_in
from support.job import needs_a_job
from support.mesh_models import either_way
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    optimizers_of,
    shard,
    step,
)
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import Zero3Error, fully_shard, record_collectives

# ---- when things are gathered


def _kept_by_hand(how):
    """Returns how often each weight is gathered in a step in which only the outermost module keeps
    its weights. Then takes a step whose weights are resharded between forward and backward.
    """
    layers = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    model, reference = shard(nn.Sequential(*layers), layers[:1], reshard_after_forward=True)
    model.set_reshard_after_forward(False, recurse=False)
    run = compiled(model, how)
    batch = batch_of(4, 8).requires_grad_()
    with record_collectives() as log:
        assert_same_step(model, reference, batch, run=run)
    model.set_reshard_after_forward(False)
    loss = mean_square(run, mine(batch))
    for module in (model, model[0]):
        module.reshard()
    assert isinstance(model[0].weight, DTensor)
    assert isinstance(model[1].weight, DTensor)
    loss.backward()
    mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    return [gathered_in(log).count(name) for name in ("0.weight", "1.weight")]


@either_way
def test_the_outermost_module_alone_may_keep_its_weights_and_all_may_let_go(run_ranks, how):
    assert run_ranks(2, _kept_by_hand, how) == 2 * [[2, 1]]


def _misguided():
    model = Recomputing(depth=3)
    reference = copy.deepcopy(model)
    first, second, third = model.blocks
    for modules in (first.up, [first, second], third, model):
        fully_shard(modules)
    first.set_modules_to_backward_prefetch([third])  # the third block's backward is over then
    third.set_modules_to_backward_prefetch([second, first.up])
    third.set_modules_to_forward_prefetch([first])
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        assert_same_step(model, reference, batch, optimizers=optimizers)


def test_hints_that_mislead_change_no_gradient(run_ranks):
    run_ranks(2, _misguided)


def _checkpointed_alone():
    model = Stack()
    # Activations have the shape of weights, so that a checkpoint does not notice a mix-up.
    model.blocks[1] = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    model, reference = shard(model, model.blocks)
    for early_stop in (True, False):
        kwargs = {"use_reentrant": False, "early_stop": early_stop}
        for i in range(2):
            batch = batch_of(16, 8, seed=i).requires_grad_()
            checkpoint(model.blocks[i], mine(batch), **kwargs).square().mean().backward()
            mean_square(reference.blocks[i], batch).backward()
        assert_same_gradients(model, reference)


def test_a_block_that_runs_by_itself_may_be_checkpointed(run_ranks):
    run_ranks(2, _checkpointed_alone)


# ---- optimizers


def _stepped_in_hooks(how):
    model, reference = shard(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4)))
    run = compiled(model, how)
    adams = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
    assert_same_step(model, reference, batch_of(4, 8), run=run)
    step(adams)
    for m in (model, reference):
        for parameter in m.parameters():
            own = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

            def hook(parameter, own=own):
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(hook)
    for seed in range(1, 4):
        mean_square(run, mine(batch_of(4, 8, seed=seed))).backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_same_parameters(model, reference, tolerance=1e-3)  # Adam first divides by small numbers


@each_way
def test_optimizers_may_change_and_step_in_hooks(run_ranks, how):
    run_ranks(2, _stepped_in_hooks, how)


# ---- states


def _state_dicts():
    model, reference = shard(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2)))
    state = model.state_dict()
    pointers = {name: tensor.to_local().data_ptr() for name, tensor in state.items()}
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        assert_same_step(model, reference, batch_of(4, 6, seed=seed), optimizers=optimizers)
    model.unshard()
    now = model.state_dict()
    assert list(now) == list(reference.state_dict())
    for name, tensor in now.items():
        assert isinstance(tensor, DTensor)
        assert tensor.to_local().data_ptr() == pointers[name]
        assert torch.equal(tensor, state[name])  # taken before
    model.reshard()
    model.load_state_dict({name: tensor.clone().fill_(3) for name, tensor in state.items()})
    for name, parameter in model.named_parameters():
        assert parameter.to_local().data_ptr() == pointers[name]
        assert (parameter.to_local() == 3).all()


def test_a_state_dict_shares_memory_with_the_model(run_ranks):
    run_ranks(2, _state_dicts)


def _piece_by_piece(how):
    reference = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    for module in (model[0], model):
        fully_shard(module)
    donor, _ = shard(reference, [reference[0]])
    for name, tensor in donor.state_dict().items():
        model.load_state_dict({name: tensor.clone()}, assign=True, strict=False)
    assert_close(compiled(model, how)(batch_of(4, 6)), donor(batch_of(4, 6)))


@either_way
def test_a_model_on_the_meta_device_is_loaded_piece_by_piece(run_ranks, how):
    run_ranks(2, _piece_by_piece, how)


class Scaled(nn.Module):
    """A module with a parameter that is computed from others."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5, bias=False)
        self.scale = nn.Parameter(torch.empty(5))

    def compute(self):
        self.scale = nn.Parameter(torch.linalg.norm(self.linear.weight.detach(), dim=1))

    def forward(self, x):
        return self.linear(x) * self.scale


def _computed(how):
    with torch.device("meta"):
        model = Scaled()
    fully_shard(model.linear)
    fully_shard(model)
    model.linear.to_empty(device="cpu")
    reference = Scaled()
    with torch.no_grad():
        rows = model.linear.weight
        rows.copy_(distribute_tensor(reference.linear.weight, rows.device_mesh, [Shard(0)]))
    for m in (model, reference):
        m.compute()
    run = compiled(model, how)
    assert_same_step(model, reference, batch_of(4, 8), run=run)


@either_way
def test_a_parameter_may_be_computed_of_sharded_ones(run_ranks, how):
    run_ranks(2, _computed, how)


# ---- subclasses


@needs_a_job
def test_a_parameter_of_a_tensor_subclass_is_refused():
    model = nn.Linear(4, 4, bias=False)
    weight = model.weight.detach()
    model.weight = nn.Parameter(TwoTensor(weight, 2 * weight))
    with pytest.raises((Zero3Error, NotImplementedError), match=r"'weight' is a.* TwoTensor"):
        fully_shard(model)
    assert type(model) is nn.Linear
