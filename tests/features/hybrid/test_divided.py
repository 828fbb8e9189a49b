"""Replicas that have a part of each shard to step, beside replicas that step all of it."""

import pytest
import torch
from support.mesh_models import assert_same_step, either_way, replicas
from support.models import (
    Stack,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mine,
    optimizers_of,
)
from support.models import shard as shard_and_copy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from deepcompile_zero3 import fully_shard, record_collectives


def divided(blocks=(), model=None, number=2, **settings):
    """Returns a model whose ``number`` replicas have parts, and an unsharded copy."""
    model = Stack() if model is None else model
    settings = {"mesh": replicas(number), "shard_optimizer_over_replicas": True} | settings
    return shard_and_copy(model, blocks or getattr(model, "blocks", ()), **settings)


def over_columns(log, number=2):
    """Returns (op, bytes) of the collectives between ``number`` replicas."""
    return [(c.op, c.nbytes) for c in log if c.world_size == number and c.op != "all_reduce"]


def _beside_whole_shards(how, transport, steps, settings):
    """Trains two models alike; returns the bytes of optimizer states of either on this rank."""
    nbytes = []
    runs = []
    for is_divided in (False, True):
        torch.manual_seed(0)
        model = Stack()
        settings = settings | {"transport": transport, "mesh": replicas()}
        for module in (*model.blocks, model):
            fully_shard(module, shard_optimizer_over_replicas=is_divided, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = compiled(model, how)
        seen = []
        for seed in range(steps):
            loss = run(mine(batch_of(8, 8, seed=seed))).square().mean()
            loss.backward()
            gradients = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            values = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
            seen.append([loss.detach(), *gradients, *values])
        runs.append(seen)
        states = (each for state in optimizer.state.values() for each in state.values())
        nbytes.append(sum(s.to_local().nbytes for s in states if isinstance(s, DTensor)))
    for whole, parts in zip(*runs, strict=True):
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
    return nbytes


@each_way
@either_transport
@pytest.mark.thin
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.more)])
def test_the_bits_are_those_of_whole_shards_and_the_states_half(run_ranks, how, transport, ranks):
    for whole, parts in run_ranks(ranks, _beside_whole_shards, how, transport, 20, {}):
        assert 2 * parts == whole


@either_way
@pytest.mark.thin
@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
    ],
    ids=["bf16", "bf16-fp32", "fp16"],
)
def test_the_bits_are_those_of_whole_shards_in_other_dtypes(run_ranks, how, policy):
    run_ranks(2, _beside_whole_shards, how, "c10d", 3, {"mp_policy": policy})


@either_way
@pytest.mark.thin
@pytest.mark.parametrize("reshard", [True, False])
def test_forwards_may_keep_what_they_gather(run_ranks, how, reshard):
    run_ranks(4, _beside_whole_shards, how, "auto", 3, {"reshard_after_forward": reshard})


def _uneven(how, number):
    layers = nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)
    model, reference = divided(model=nn.Sequential(*layers), number=number)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 6, seed=seed)
        assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
    return [parameter.to_local().shape[0] for parameter in model.parameters()]


@either_way
def test_rows_need_not_divide_by_the_ranks(run_ranks, how):
    assert run_ranks(4, _uneven, how, 2) == [
        [2, 2, 2, 2, 1, 1],
        [2, 2, 1, 1, 0, 0],
        [2, 2, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0],
    ]


@pytest.mark.first(how="eager")
@either_way
def test_each_rank_may_be_a_replica(run_ranks, how):
    run_ranks(4, _uneven, how, 4)


def test_a_single_replica_has_whole_shards(run_ranks):
    run_ranks(2, _uneven, "eager", 1)


def _columns(how):
    """Returns what travels between replicas in a forward and in the step around it."""
    model, _ = divided(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert {p.placements for p in model.parameters()} == {(Shard(0), Shard(0))}
    run = compiled(model, how)
    (optimizer,) = optimizers_of(model)
    seen = []
    for seed in range(3):
        with record_collectives() as forward:
            loss = run(mine(batch_of(8, 8, seed=seed))).square().mean()
        with record_collectives() as backward:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((over_columns(forward), over_columns(backward)))
    assert seen[0] == seen[1] == seen[2]
    return seen[0]


HEAD, BLOCK = 8 * 8 + 8, 8 + 8 + 16 * 8 + 16 + 8 * 16 + 8


@either_way
def test_each_element_crosses_between_replicas_once_each_way_in_the_dtype_of_computation(
    run_ranks, how
):
    for forward, backward in run_ranks(2, _columns, how):
        assert [op for op, _ in forward] == ["all_gather"]
        assert [op for op, _ in backward] == ["reduce_scatter"]
        assert sum(nbytes for _, nbytes in forward) == 2 * (2 * BLOCK + HEAD)
        assert sum(nbytes for _, nbytes in backward) == 4 * (2 * BLOCK + HEAD)  # as the leaf wants


def _micro_batches(how):
    model, reference = divided()
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for step in range(2):
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            batch = batch_of(4, 8, seed=3 * step + number)
            with record_collectives() as log:
                run(mine(batch)).square().mean().backward()
            reference(batch).square().mean().backward()
            ops = [op for op, _ in over_columns(log)]
            gathers, reduces = ["all_gather"] * (number == 0), ["reduce_scatter"] * (number == 2)
            assert ops == gathers + reduces
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), whole)


@either_way
def test_micro_batches_without_sync_send_nothing_between_replicas(run_ranks, how):
    run_ranks(2, _micro_batches, how)


def _sync_without_all_reduce(how):
    model, reference = divided()
    run = compiled(model, how)
    for number in range(2):
        model.set_requires_all_reduce(number == 1)
        batch = batch_of(4, 8, seed=number)
        assert all(parameter.grad is None for parameter in model.parameters())
        run(mine(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
    for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad)


@either_way
def test_shards_of_gradients_may_be_summed_before_replicas_share_them(run_ranks, how):
    run_ranks(4, _sync_without_all_reduce, how)
