"""The methods that a sharded module shares with FSDP2."""

import pytest
import torch
import torch.distributed as dist
from support.fsdp2_scenarios import Recomputing, gathered_in
from support.job import needs_a_job
from support.models import (
    assert_same_gradients,
    assert_same_parameters,
    assert_same_step,
    batch_of,
    compiled,
    compiled_each_way,
    each_way,
    either_transport,
    gathered_fqns,
    layers_of,
    mean_square,
    mine,
    optimizers_of,
    shard,
    step,
)
from torch import nn
from torch.distributed.fsdp import UnshardHandle
from torch.testing import assert_close

from deepcompile_zero3 import Zero3Error, fully_shard, record_collectives, share_comm_ctx
from deepcompile_zero3.fsdp2.methods import REFUSED

# ---- set_reshard_after_backward


def _micro_batches(how, reshard_after_forward, transport):
    """Compares two steps with one process; returns how often each micro-batch gathers a weight."""
    model = layers_of(8, 12, 4)
    model, reference = shard(
        model, model, reshard_after_forward=reshard_after_forward, transport=transport
    )
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for number in range(2):
        counts = []
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model.set_reshard_after_backward(micro == 2)
            batch = batch_of(4, 8, seed=3 * number + micro).requires_grad_()
            with record_collectives() as log:
                mean_square(run, mine(batch)).backward()
                gathered = gathered_in(log)
            mean_square(reference, batch).backward()
            assert gathered.count("0.weight") == gathered.count("1.weight")
            counts.append(gathered.count("0.weight"))
        assert gathered_fqns(model) == []
        assert_same_gradients(model, reference)
        step(optimizers)
        assert_same_parameters(model, reference)
    return counts


@pytest.mark.thin
@each_way
@either_transport
@pytest.mark.parametrize(
    ("reshard_after_forward", "expected"),
    [(True, [2, 1, 1]), (False, [1, 0, 0]), (None, [1, 0, 0])],
)
def test_parameters_left_gathered_by_a_backward_are_not_gathered_again(
    run_ranks, how, transport, reshard_after_forward, expected
):
    for counts in run_ranks(2, _micro_batches, how, reshard_after_forward, transport):
        assert counts == expected


def _changed_while_held(how, transport):
    model, reference = shard(layers_of(8, 8, 4), transport=transport)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    model.set_reshard_after_backward(False)
    assert_same_step(model, reference, batch_of(4, 8), run=run, optimizers=optimizers)
    assert gathered_fqns(model) == ["0.weight", "1.weight"]
    with pytest.raises(Zero3Error, match=r"'0\.weight' has changed since it was gathered.*reshard"):
        run(mine(batch_of(4, 8)))
    model.reshard()
    assert gathered_fqns(model) == []
    assert_same_step(model, reference, batch_of(4, 8, seed=1), run=run, optimizers=optimizers)


@each_way
@either_transport
def test_a_held_tensor_is_refused_after_its_parameter_changed(run_ranks, how, transport):
    run_ranks(2, _changed_while_held, how, transport)


class Writing(nn.Module):
    """A module that writes to its weight on request."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, writes=False):
        if writes:
            with torch.no_grad():
                self.weight.mul_(2)
        return x @ self.weight


def _alternating(how, transport):
    """Alternates eager and compiled micro-batches, evaluates, writes to and replaces a weight."""
    model, reference = shard(Writing(), transport=transport)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for number in range(2):
        for micro, forward in enumerate((run, model, run, model)):
            model.set_reshard_after_backward(micro == 3)
            batch = batch_of(4, 8, seed=4 * number + micro)
            mean_square(forward, mine(batch)).backward()
            mean_square(reference, batch).backward()
            assert bool(gathered_fqns(model)) == (micro < 3)
            with torch.inference_mode():
                assert_close(forward(batch), reference(batch))
        assert_same_gradients(model, reference)
        step(optimizers)
        assert_same_parameters(model, reference)
    model.set_reshard_after_backward(False)
    mean_square(run, mine(batch)).backward()
    with pytest.raises(Zero3Error, match="'weight' was modified in place"):
        model(mine(batch), writes=True)
    assert gathered_fqns(model) == []
    mean_square(run, mine(batch)).backward()
    model.load_state_dict({"weight": model.weight.detach().clone()}, assign=True)
    assert_close(model(batch), reference(batch))


@compiled_each_way
@either_transport
def test_eager_and_compiled_code_hold_alike(run_ranks, transport, how):
    run_ranks(2, _alternating, how, transport)


def _checkpointed():
    """Returns how often each micro-batch gathers a weight whose block is recomputed."""
    model = Recomputing()
    model, reference = shard(model, model.blocks, reshard_after_forward=True)
    counts = []
    for micro in range(3):
        model.set_reshard_after_backward(micro == 2)
        batch = batch_of(4, 8, seed=micro).requires_grad_()
        with record_collectives() as log:
            mean_square(model, mine(batch)).backward()
            counts.append(gathered_in(log).count("blocks.0.up.weight"))
        mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    assert gathered_fqns(model) == []
    return counts


def test_a_recomputation_leaves_it_gathered_too(run_ranks):
    assert run_ranks(2, _checkpointed) == 2 * [[2, 1, 1]]


# ---- unshard


def _asynchronous_unshard(transport):
    model = layers_of(8, 8, 4)
    weight = model[0].weight.detach().clone()
    fully_shard(model, transport=transport)
    with record_collectives() as log:
        handle = model.unshard(async_op=True)
        assert isinstance(handle, UnshardHandle)
        assert gathered_in(log) == ["0.weight", "1.weight"]
        handle.wait()
        handle.wait()
        assert torch.equal(model[0].weight, weight)
        model.reshard()
        handle.wait()  # the parameter is freed
        assert gathered_fqns(model) == []

        model.unshard(async_op=True)
        assert torch.equal(model[0].weight, weight)  # waits

        model.reshard()
        model.unshard(async_op=True)
        model.reshard()  # before a wait
        assert gathered_fqns(model) == []
        model(batch_of(2, 8).requires_grad_()).sum().backward()
        assert gathered_in(log) == 5 * ["0.weight", "1.weight"]


@either_transport
def test_an_unshard_may_be_waited_for_later(run_ranks, transport):
    run_ranks(2, _asynchronous_unshard, transport)


def _unshard_ahead_of_a_backward(how, transport, waits):
    model, reference = shard(layers_of(8, 8, 4), transport=transport, reshard_after_forward=True)
    run = compiled(model, how)
    batch = batch_of(4, 8)
    loss = mean_square(run, mine(batch))
    handle = model.unshard(async_op=True)
    loss.backward()  # gathers the same
    if waits:
        handle.wait()
    mean_square(run, mine(batch)).backward()
    for _ in range(2):
        mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)


@each_way
@either_transport
@pytest.mark.parametrize("waits", [True, False])
def test_an_unshard_may_be_waited_for_after_a_backward(run_ranks, how, transport, waits):
    run_ranks(2, _unshard_ahead_of_a_backward, how, transport, waits)


def _unshard_then_forward(how, transport):
    model, reference = shard(layers_of(8, 8, 4), transport=transport)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        with record_collectives() as log:
            model.unshard(async_op=seed > 0)
            loss = mean_square(run, mine(batch_of(4, 8, seed=seed)))
            assert gathered_in(log) == ["0.weight", "1.weight"]
        assert gathered_fqns(model) == []
        loss.backward()
        mean_square(reference, batch_of(4, 8, seed=seed)).backward()
        assert_same_gradients(model, reference)
        step(optimizers)
        assert_same_parameters(model, reference)


@each_way
@either_transport
def test_a_forward_does_not_gather_what_is_unsharded(run_ranks, how, transport):
    run_ranks(2, _unshard_then_forward, how, transport)


# ---- methods that ask for what is done always


class Event:
    """An event that notes who waits for it."""

    waited = 0

    def wait(self):
        self.waited += 1


def _asked_for(how):
    model, reference = shard(layers_of(8, 8, 4))
    share_comm_ctx([model, fully_shard(layers_of(2, 2))])
    with pytest.raises(ValueError, match="Linear was not sharded"):
        share_comm_ctx([nn.Linear(2, 2)])
    model.set_force_sum_reduction_for_comms(True)
    model.set_separate_reduce_scatter_group(recurse=True)
    model.set_unshard_in_backward(False)
    model.set_reduce_scatter_divide_factor(dist.get_world_size())
    event = Event()
    model.set_post_optim_event(event)
    assert event.waited == 1
    assert_same_step(model, reference, batch_of(4, 8), run=compiled(model, how))


@each_way
def test_methods_without_an_effect_may_be_called(run_ranks, how):
    run_ranks(2, _asked_for, how)


# ---- methods that are refused


@needs_a_job
@pytest.mark.parametrize("name", REFUSED)
def test_methods_without_a_meaning_here_are_refused_by_name(name):
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=f"{name} is not supported: "):
        getattr(model, name)(True)
