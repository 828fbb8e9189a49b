"""Meshes of two dimensions: shards that are replicated, compared with one process or FSDP2."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.job import needs_a_job
from support.mesh_models import assert_same_step, either_way, replicas
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    batch_of,
    compiled,
    each_way,
    mine,
    optimizers_of,
    shard,
    step,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from deepcompile_zero3 import defer_reduction, deposit_grad, fully_shard, record_collectives


def summary(log, *ops):
    """Returns (op, bytes, number of parameters) of each collective, or of those of ``ops``."""
    return [(c.op, c.nbytes, len(c.params)) for c in log if not ops or c.op in ops]


def reductions(log):
    return [c.op for c in log if c.op != "all_gather"]


def _replicated(how, transport):
    """Compares three steps with one process; returns the collectives of the last."""
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks, mesh=replicas(), transport=transport)
    assert {p.placements for p in model.parameters()} == {(Replicate(), Shard(0))}
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        with record_collectives() as log:
            batch = batch_of(8, 8, seed=seed)
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    return summary(log)


HEAD, BLOCK = 4 * (8 * 8 + 8), 4 * (8 + 8 + 16 * 8 + 16 + 8 * 16 + 8)

BIASES = 4 * (16 + 8)  # bytes of the block's biases, which an eager backward does not need
COMPILED = 2 * [("all_gather", BLOCK + HEAD, 8)]
EAGER = [("all_gather", BLOCK, 6), ("all_gather", HEAD, 2)]
GATHERS = {
    ("compiled", "shared_memory"): COMPILED,
    ("compiled", "c10d"): COMPILED,
    # Eager code keeps the head, which belongs to the outermost module.
    ("eager", "shared_memory"): [*EAGER, ("all_gather", BLOCK - BIASES, 4)],
    ("eager", "c10d"): [*EAGER, EAGER[0]],
}


@each_way
@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_replicas_train_as_one_process_and_sum_shards_in_one_all_reduce(run_ranks, how, transport):
    for collectives in run_ranks(4, _replicated, how, transport):
        assert collectives == [
            *GATHERS["eager" if how == "eager" else "compiled", transport],
            ("reduce_scatter", BLOCK + HEAD, 8),
            ("all_reduce", (BLOCK + HEAD) // 2, 8),
        ]


def _uneven_replicas(how, number):
    layers = nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)
    model, reference = shard(nn.Sequential(*layers), mesh=replicas(number))
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 6, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    return [parameter.to_local().shape[0] for parameter in model.parameters()]


@either_way
def test_rows_need_not_divide_by_the_ranks_of_a_replica(run_ranks, how):
    assert run_ranks(4, _uneven_replicas, how, 2) == 2 * [[4, 4, 3, 3, 1, 1], [3, 3, 2, 2, 0, 0]]


@either_way
def test_every_rank_may_have_the_whole_model(run_ranks, how):
    assert run_ranks(4, _uneven_replicas, how, 4) == 4 * [[7, 7, 5, 5, 1, 1]]


@either_way
def test_there_may_be_a_single_replica(run_ranks, how):
    assert run_ranks(4, _uneven_replicas, how, 1) == [
        [2, 2, 2, 2, 1, 1],
        [2, 2, 2, 2, 0, 0],
        [2, 2, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0],
    ]


class Branching(nn.Module):
    """A model that uses its second layer on request."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x, both=False):
        x = torch.tanh(self.first(x))
        return self.second(x) if both else x


def backward(model, reference, seed, run=None, **kwargs):
    """Runs forward and backward on a batch of both models; returns the reductions."""
    batch = batch_of(8, 8, seed=seed)
    with record_collectives() as log:
        (model if run is None else run)(mine(batch), **kwargs).square().mean().backward()
        found = reductions(log)
    reference(batch, **kwargs).square().mean().backward()
    return found


def _micro_batches(how):
    model, reference = shard(Branching(), mesh=replicas())
    run = compiled(model, how)
    for number in range(2):  # the second step adds to the gradients of the first
        before = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
        seen = []
        for seed, (syncs, all_reduces) in enumerate([(False, True), (True, False), (True, False)]):
            model.set_requires_gradient_sync(syncs)
            model.set_requires_all_reduce(all_reduces)
            seen.append(backward(model, reference, 4 * number + seed, run, both=True))
            for parameter, grad in zip(model.parameters(), before, strict=True):
                if grad is None:
                    assert parameter.grad is None
                else:
                    assert torch.equal(parameter.grad.to_local(), grad)
        model.set_requires_gradient_sync(True)  # over replicas too
        seen.append(backward(model, reference, 4 * number + 3, run, both=True))
        scattered = ["reduce_scatter"]
        assert seen == [[], scattered, scattered, [*scattered, "all_reduce"]]
        assert_same_gradients(model, reference)


@either_way
def test_micro_batches_may_be_summed_over_replicas_once(run_ranks, how):
    run_ranks(4, _micro_batches, how)


def _only_in_the_first_micro_batch(how):
    model, reference = shard(Branching(), mesh=replicas())
    run = compiled(model, how)
    model.set_requires_all_reduce(False)
    backward(model, reference, 0, run, both=True)
    model.set_requires_all_reduce(True)
    with record_collectives() as log:
        backward(model, reference, 1, run)
    summed = [fqn for c in log if c.op == "all_reduce" for fqn in c.params]
    assert sorted(summed) == sorted(name for name, _ in model.named_parameters())
    assert reference.second.weight.grad is not None
    assert_same_gradients(model, reference)


@either_way
def test_a_gradient_of_the_first_micro_batch_alone_arrives(run_ranks, how):
    run_ranks(4, _only_in_the_first_micro_batch, how)


def _hooks():
    model, reference = shard(Branching(), mesh=replicas())
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    model.set_requires_all_reduce(False)
    backward(model, reference, 0, both=True)
    assert fired == []
    model.set_requires_all_reduce(True)
    backward(model, reference, 1, both=True)
    assert sorted(fired) == sorted(name for name, _ in model.named_parameters())


def test_hooks_on_accumulated_gradients_wait_for_the_all_reduce(run_ranks):
    run_ranks(4, _hooks)


def _one_layer_waits():
    """Sums a part of the model over replicas later than the rest."""
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks, mesh=replicas())
    model.blocks[0].set_requires_all_reduce(False)
    backward(model, reference, 0)
    assert all(parameter.grad is None for parameter in model.blocks.parameters())
    assert_same_gradients(model.head, reference.head)
    model.set_requires_all_reduce(False, recurse=False)
    model.blocks[0].set_requires_all_reduce(True)
    backward(model, reference, 1)
    assert_same_gradients(model.blocks, reference.blocks)
    model.set_requires_all_reduce(True)
    backward(model, reference, 2)
    assert_same_gradients(model, reference)


def test_blocks_may_be_summed_over_replicas_at_different_times(run_ranks):
    run_ranks(4, _one_layer_waits)


def _deferred():
    model, reference = shard(Branching(), mesh=replicas())
    late = torch.full((8, 8), 4.0)
    with record_collectives() as log, defer_reduction(model):
        for seed in range(2):
            backward(model, reference, seed)
        if dist.get_rank() == 3:
            deposit_grad(model.second.weight, late)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert reductions(log) == ["reduce_scatter", "all_reduce"]
    reference.second.weight.grad = late / 4
    assert_same_gradients(model, reference)

    model.set_requires_all_reduce(False)
    with record_collectives() as log, defer_reduction(model):
        backward(model, reference, 2)
    assert reductions(log) == ["reduce_scatter"]
    model.set_requires_all_reduce(True)
    backward(model, reference, 3)
    assert_same_gradients(model, reference)


def test_a_deposit_of_one_rank_reaches_its_replicas(run_ranks):
    run_ranks(4, _deferred)


def _divided():
    model, reference = shard(Branching(), mesh=replicas())
    model.set_gradient_divide_factor(2)
    backward(model, reference, 0)
    for parameter in reference.first.parameters():
        parameter.grad *= 4 / 2
    assert_same_gradients(model, reference)


def test_the_divide_factor_is_that_of_all_ranks(run_ranks):
    run_ranks(4, _divided)


def _divided_by_two_factors():
    model, reference = shard(Branching(), mesh=replicas())
    model.set_gradient_divide_factor(2)
    model.set_requires_all_reduce(False)
    backward(model, reference, 0, both=True)
    for parameter in reference.parameters():
        parameter.grad *= 8 / 2
    model.set_gradient_divide_factor(8)
    model.set_requires_all_reduce(True)
    backward(model, reference, 1, both=True)
    for parameter in reference.parameters():
        parameter.grad *= 4 / 8
    assert_same_gradients(model, reference)


def test_each_micro_batch_is_divided_by_the_factor_of_its_own_backward(run_ranks):
    run_ranks(4, _divided_by_two_factors)


def _given_up():
    model, reference = shard(Branching(), mesh=replicas())
    model.set_requires_all_reduce(False)
    backward(model, reference, 0, both=True)
    model.reset_iter_state()
    reference.zero_grad()
    model.set_requires_all_reduce(True)
    backward(model, reference, 1)
    assert_same_gradients(model, reference)


def test_sums_not_yet_over_replicas_can_be_given_up(run_ranks):
    run_ranks(4, _given_up)


def _raising_between(transport):
    model = Stack()
    model, reference = shard(model, model.blocks, mesh=replicas(), transport=transport)

    def fail(grad):
        raise KeyError("as asked for")

    def set_trap(module, args, output):
        output.register_hook(fail)

    model.set_requires_all_reduce(False)
    backward(model, reference, 0)
    trap = model.blocks[0].register_forward_hook(set_trap)
    with contextlib.suppress(KeyError):
        model(mine(batch_of(8, 8))).sum().backward()
        raise AssertionError("nothing was raised")
    trap.remove()
    reference.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        model.set_requires_all_reduce(False)
        backward(model, reference, 2 * seed)
        model.set_requires_all_reduce(True)
        backward(model, reference, 2 * seed + 1)
        assert_same_gradients(model, reference)
        step(optimizers)
        assert_same_parameters(model, reference)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_a_backward_that_raises_between_micro_batches_leaves_nothing(run_ranks, transport):
    run_ranks(4, _raising_between, transport)


def _clipped():
    model, reference = shard(Stack(), mesh=replicas())
    backward(model, reference, 0)
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
    assert norms[0].full_tensor().item() == pytest.approx(norms[1].item(), rel=1e-5)
    assert_same_gradients(model, reference)


def test_gradients_of_replicas_are_clipped_by_the_norm_of_all(run_ranks):
    run_ranks(4, _clipped)


@needs_a_job
def test_a_mesh_of_two_dimensions_needs_no_names():
    model = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1)))
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.placements == (Replicate(), Shard(0))
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(2, 2))
