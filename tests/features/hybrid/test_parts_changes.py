"""Parts that change: by steps, by loads, by writes that count nowhere, and ahead of a backward."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.mesh_models import either_way, replicas
from support.models import Stack, batch_of, compiled, each_way, either_transport, mine, step
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from deepcompile_zero3 import Zero3Error, fully_shard, record_collectives


def divided(model=None, **settings):
    """Returns a model of two replicas with parts, and an unsharded copy."""
    model = Stack(depth=1) if model is None else model
    reference = copy.deepcopy(model)
    settings = {"mesh": replicas(), "shard_optimizer_over_replicas": True} | settings
    for block in getattr(model, "blocks", ()):
        fully_shard(block, **settings)
    return fully_shard(model, **settings), reference


def assert_same_output(run, reference, seed=0):
    """Asserts that a forward computes from the values of ``reference``; returns the gathers
    between replicas.
    """
    batch = batch_of(4, 8, seed=seed)
    with record_collectives() as log:
        output = run(mine(batch))
    torch.testing.assert_close(output, mine(reference(batch)))
    return [c for c in log if c.op == "all_gather" and c.world_size == 2]


def _local_of(parameter, values):
    """Returns this rank's part of ``values``, which are those of a whole parameter."""
    return distribute_tensor(values, parameter.device_mesh, parameter.placements).to_local()


def _written(how, write):
    model, reference = divided()
    run = compiled(model, how)
    for number in range(3):
        with torch.no_grad():
            if number:
                assert len(assert_same_output(run, reference)) == 0  # nothing has changed
            for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
                whole.mul_(0.5).add_(0.1)
                write(parameter, whole.detach())
            assert len(assert_same_output(run, reference)) == 1
    assert_same_output(run, reference)


def by_data(parameter, values):
    parameter.data.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))


def by_local(parameter, values):
    parameter.to_local().data.copy_(_local_of(parameter, values))


def by_copy(parameter, values):
    parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))


@pytest.mark.thin
@either_way
@pytest.mark.parametrize("write", [by_data, by_local, by_copy])
def test_a_write_is_seen_however_it_was_made(run_ranks, how, write):
    run_ranks(2, _written, how, write)


def _written_on_one_replica(how):
    model, reference = divided()
    run = compiled(model, how)
    with torch.no_grad():
        assert_same_output(run, reference)
        for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
            factor = torch.full_like(parameter, 1)
            if dist.get_rank() == 0:
                factor.to_local().fill_(0.5)
                parameter.mul_(0.5)
            whole.mul_(factor.full_tensor())
        assert len(assert_same_output(run, reference)) == 1
        assert len(assert_same_output(run, reference)) == 0


@either_way
def test_replicas_whose_parts_have_all_changed_tell_the_others(run_ranks, run_collectives, how):
    run_ranks(2, _written_on_one_replica, how)
    run_collectives(2, _written_on_one_replica, how)


def _frozen(how):
    """A frozen part that a momentum update writes, beside one that an optimizer steps."""
    model, reference = divided()
    for each in (model, reference):
        each.blocks[0].requires_grad_(False)
    run = compiled(model, how)
    optimizers = [torch.optim.AdamW(m.head.parameters(), lr=0.1) for m in (model, reference)]
    gathers = []
    for number in range(4):
        gathers.append(sum(c.nbytes for c in assert_same_output(run, reference, seed=number)))
        run(mine(batch_of(4, 8, seed=number))).square().mean().backward()
        reference(batch_of(4, 8, seed=number)).square().mean().backward()
        step(optimizers)
        if number == 1:
            for parameter in model.blocks[0].parameters():
                parameter.data.mul_(0.8).add_(0.1)
            for parameter in reference.blocks[0].parameters():
                parameter.data.mul_(0.8).add_(0.1)
    head = 4 * (8 * 8 + 8)
    assert gathers == [gathers[0], head, gathers[0], head]


@either_way
def test_what_is_frozen_is_gathered_once_and_again_when_it_was_written(run_ranks, how):
    run_ranks(2, _frozen, how)


def _fused(how, fused):
    model, reference = divided()
    run = compiled(model, how)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **fused) for m in (model, reference)]
    for number in range(3):
        batch = batch_of(4, 8, seed=number)
        run(mine(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
        step(optimizers)
        assert_same_output(run, reference)


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("fused", [{"fused": True}, {"foreach": True}])
def test_fused_steps_are_seen(run_ranks, how, fused):
    run_ranks(2, _fused, how, fused)


def _loaded(how):
    model, reference = divided()
    run = compiled(model, how)
    assert_same_output(run, reference)
    torch.manual_seed(1)
    other = Stack(depth=1)
    state = {
        name: distribute_tensor(
            value, model.get_parameter(name).device_mesh, model.get_parameter(name).placements
        )
        for name, value in other.state_dict().items()
    }
    model.load_state_dict(state)
    assert_same_output(run, other)
    torch.manual_seed(2)
    another = Stack(depth=1)
    state = {
        name: distribute_tensor(
            value, model.get_parameter(name).device_mesh, model.get_parameter(name).placements
        )
        for name, value in another.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    assert_same_output(run, another)


@either_way
def test_a_load_is_seen(run_ranks, how):
    run_ranks(4, _loaded, how)


def _on_meta(how):
    torch.manual_seed(0)
    reference = Stack(depth=1)
    with torch.device("meta"):
        model = Stack(depth=1)
    model, _ = divided(model)
    run = compiled(model, how)
    with pytest.raises(Zero3Error, match="meta"):
        run(batch_of(2, 8))
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.to_local().copy_(_local_of(parameter, reference.get_parameter(name).detach()))
    assert_same_output(run, reference)
    run(mine(batch_of(4, 8))).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@either_way
def test_a_model_may_be_built_on_the_meta_device(run_ranks, how):
    run_ranks(2, _on_meta, how)


def _apart(how):
    model = Stack(depth=1)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.head.bias.add_(1)
    model, _ = divided(model)
    with pytest.raises(Zero3Error, match=r"'head\.bias' on rank 1 is not what it is on rank 0"):
        compiled(model, how)(mine(batch_of(4, 8))).square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():  # as a load does
            parameter.mul_(0.5)
    compiled(model, how)(mine(batch_of(4, 8))).square().mean().backward()


@either_way
def test_replicas_that_begin_with_other_values_are_named(run_ranks, how):
    run_ranks(2, _apart, how)


def _stepped_before_backward(how, transport):
    """A backward computes with the values of its forward, whatever has changed since."""
    model, reference = divided(transport=transport)
    run = compiled(model, how)
    batch = batch_of(4, 8)
    loss = run(mine(batch)).square().mean()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    loss.backward()
    reference(batch).square().mean().backward()
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad)
        with torch.no_grad():
            whole.mul_(3)
    assert_same_output(run, reference)


@either_way
@either_transport
def test_a_backward_has_the_values_of_its_forward(run_ranks, how, transport):
    run_ranks(2, _stepped_before_backward, how, transport)


def _retained(how):
    model, _ = divided()
    model.set_reshard_after_backward(False)
    run = compiled(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    run(mine(batch_of(4, 8))).square().mean().backward()
    optimizer.step()
    with pytest.raises(Zero3Error, match="has changed since it was gathered"):
        run(mine(batch_of(4, 8)))
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    run(mine(batch_of(4, 8))).square().mean().backward()


@either_way
def test_what_is_retained_over_a_step_is_refused(run_ranks, how):
    run_ranks(2, _retained, how)


def _raised(how):
    model, reference = divided()
    run = compiled(model, how)
    assert_same_output(run, reference)

    def fail(*_):
        raise KeyError("in a forward")

    with torch.no_grad():
        for each in (model, reference):
            for parameter in each.parameters():
                parameter.mul_(0.5)
    handle = model.blocks[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(mine(batch_of(4, 8)))
    handle.remove()
    assert_same_output(run, reference)
    assert_same_output(run, reference)


@either_way
def test_a_forward_that_raises_loses_nothing(run_ranks, how):
    run_ranks(2, _raised, how)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).tanh())


def _tied(how):
    model, reference = divided(Tied())
    assert model.first.weight is model.last.weight
    assert isinstance(model.first.weight, DTensor)
    run = compiled(model, how)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for number in range(2):
        batch = batch_of(4, 8, seed=number)
        run(mine(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
        step(optimizers)
        assert_same_output(run, reference)


@either_way
def test_a_tied_parameter_has_one_part(run_ranks, how):
    run_ranks(4, _tied, how)


def _written_ahead_of_micro_batches(how):
    model, reference = divided()
    run = compiled(model, how)
    for number in range(2):
        for each in (model, reference):
            for parameter in each.parameters():
                parameter.data.mul_(0.5).add_(0.1)
        model.set_requires_gradient_sync(False)
        assert len(assert_same_output(run, reference, seed=number)) == 1
        assert len(assert_same_output(run, reference, seed=number)) == 0
        model.set_requires_gradient_sync(True)
        run(mine(batch_of(4, 8))).square().mean().backward()
        model.zero_grad()


@either_way
def test_a_write_ahead_of_the_first_micro_batch_is_seen(run_ranks, how):
    run_ranks(2, _written_ahead_of_micro_batches, how)


def _replaced_between_micro_batches(how):
    model, reference = divided()
    torch.manual_seed(1)
    other, of_other = divided(Stack(depth=1))
    run = compiled(model, how)
    model.set_requires_gradient_sync(False)
    assert len(assert_same_output(run, reference)) == 1
    assert len(assert_same_output(run, reference)) == 0
    model.load_state_dict(other.state_dict(), assign=True)  # changed as often as those before
    assert len(assert_same_output(run, of_other)) == 1
    assert len(assert_same_output(run, of_other)) == 0


@either_way
def test_parts_that_are_replaced_between_micro_batches_are_gathered(run_ranks, how):
    run_ranks(2, _replaced_between_micro_batches, how)


def _retained_over_a_change(how):
    model, _ = divided(reshard_after_forward=True)
    model.set_reshard_after_backward(False)
    run = compiled(model, how)
    loss = run(mine(batch_of(4, 8))).square().mean()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    loss.backward()  # with the values of its forward, which it retains
    with pytest.raises(Zero3Error, match="has changed since it was gathered"):
        run(mine(batch_of(4, 8)))


@either_way
def test_old_values_that_a_backward_retains_are_refused(run_ranks, how):
    run_ranks(2, _retained_over_a_change, how)


def _stepped_where_there_are_rows(how):
    model, reference = divided(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    run = compiled(model, how)
    with torch.no_grad():
        for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.mul_(0.5)
            if parameter.to_local().numel():  # none of the last layer's on rank 1
                parameter.to_local().mul_(0.5)
        assert_same_output(run, reference)
    run(mine(batch_of(4, 8))).square().mean().backward()  # replicas were built alike


@either_way
def test_a_replica_without_rows_follows_the_others(run_ranks, how):
    run_ranks(2, _stepped_where_there_are_rows, how)
