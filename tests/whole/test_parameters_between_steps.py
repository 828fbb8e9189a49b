"""Changes of parameters between steps reach the next forward; attributes and hooks survive."""

import copy
from collections import Counter

import torch
import torch.distributed as dist
from support.models import (
    Stack,
    assert_same_parameters,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    mean_square,
    shard,
    shard_stack,
)
from torch import nn
from torch.distributed.tensor import DTensor

# ---- changes of the parameters


def _initialize(how):
    model, reference = shard_stack()
    run = compiled(model, how)
    assert_same_step(model, reference, batch_of(4, 8), run=run)
    for m in (model, reference):
        m.zero_grad()
    layer = model.blocks[0].up
    before = layer.weight.to_local().clone()
    nn.init.normal_(layer.weight)
    assert not torch.equal(layer.weight.to_local(), before)
    assert layer.weight is dict(model.named_parameters())["blocks.0.up.weight"]
    with torch.no_grad():
        reference.blocks[0].up.weight.copy_(layer.weight.full_tensor())
    assert_same_step(model, reference, batch_of(4, 8), run=run)


@each_way
def test_initializing_a_weight_changes_the_shard(run_ranks, how):
    run_ranks(2, _initialize, how)


def _change(how):
    model, reference = shard_stack()
    run = compiled(model, how)
    assert_same_step(model, reference, batch_of(4, 8), run=run)

    def step_after(change):
        change()
        for m in (model, reference):
            m.zero_grad()
        assert_same_step(model, reference, batch_of(4, 8), run=run)
        assert_same_parameters(model, reference)

    def copy_data():
        for m in (model, reference):
            for parameter in m.parameters():
                parameter.data.copy_(parameter.data * 0.5)

    def scale_data():
        for m in (model, reference):
            for parameter in m.parameters():
                parameter.data.mul_(1.25)

    @torch.no_grad()
    def write_local():
        for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.to_local().neg_()
            whole.neg_()

    def load(assign):
        other, state = shard_stack()
        del other
        whole = {fqn: torch.randn_like(tensor) for fqn, tensor in state.state_dict().items()}
        dist.broadcast_object_list(values := [whole], src=0)
        reference.load_state_dict(values[0])
        shards = shard(copy.deepcopy(reference))[0].state_dict()
        model.load_state_dict(shards, assign=assign)

    step_after(copy_data)
    step_after(scale_data)
    step_after(write_local)
    step_after(lambda: load(assign=False))
    step_after(lambda: load(assign=True))


@each_way
def test_the_next_forward_sees_every_change_of_the_parameters(run_ranks, how):
    run_ranks(2, _change, how)


def _attributes():
    model = Stack()
    for fqn, parameter in model.named_parameters():
        parameter.tag = fqn
    model, _ = shard(model, model.blocks)
    for _ in range(2):
        assert all(parameter.tag == fqn for fqn, parameter in model.named_parameters())
        assert model.head.weight.tag == "head.weight"
        assert all(parameter.is_leaf for parameter in model.parameters())
        mean_square(model, batch_of(2, 8)).backward()


def test_attributes_of_parameters_survive(run_ranks):
    run_ranks(2, _attributes)


# ---- hooks and errors


def _hooks(how):
    model, reference = shard_stack()
    run = compiled(model, how)
    fired = Counter()

    def hook(parameter):
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        fired[parameter] += 1

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(1, 3):
        assert_same_step(model, reference, batch_of(4, 8, seed=step), run=run)
        assert dict(fired) == dict.fromkeys(model.parameters(), step)


@each_way
def test_hooks_on_accumulated_gradients_fire_once_in_a_backward(run_ranks, how):
    run_ranks(2, _hooks, how)
