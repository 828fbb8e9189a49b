"""Gathers that start ahead of the graph, or of the eager module, that asks for them."""

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from support.fsdp2_scenarios import gathered_in
from support.models import (
    assert_same_gradients,
    batch_of,
    either_transport,
    for_all,
    gathered_fqns,
    in_little_memory,
    mine,
    optimizers_of,
    shard,
    step,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import record_collectives

each_way = pytest.mark.parametrize("how", ["eager", "interpreted"])


class Routed(nn.Module):
    """Blocks between two layers. A call says which blocks run, in which order."""

    def __init__(self, depth=4, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, width)

    def forward(self, x, route, checkpointed=(), raises=False):
        x = self.first(x)
        for i in route:
            block = self.blocks[i]
            x = checkpoint(block, x, use_reentrant=False) if i in checkpointed else block(x)
            x = x.tanh()
        if raises:
            raise ArithmeticError
        return self.head(x)


def _sharded(how, bytes_ahead=None, **kwargs):
    torch.manual_seed(0)
    model = Routed()
    model, reference = shard(model, model.blocks, **kwargs)
    options = {"inductor": False}
    if bytes_ahead is not None:
        options["gather_bucket_mb"] = bytes_ahead / 2**20
        model._zero3_group.model.gather_orders.bytes_ahead = bytes_ahead
    if how != "eager":
        for block in model.blocks:
            block.compile(backend="zero3", options=options)
    return model, reference


class _Interrupt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError


calls = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["train"] * 5 + ["evaluate", "raise", "raise in backward"]),
        "route": st.lists(st.integers(0, 3), min_size=1, max_size=6),
        "repeats": st.integers(1, 3),  # of this call
        "checkpointed": st.sets(st.integers(0, 3), max_size=2),
        "syncs": st.sampled_from([True, True, False]),
        "steps": st.booleans(),
    }
)


def _check_calls(case, how, kwargs):
    model, reference = _sharded(how, **kwargs)
    optimizers = optimizers_of(model, reference)
    number = 0
    for call in case:
        for _ in range(call["repeats"]):
            number += 1
            batch = batch_of(4, 6, seed=number)
            arguments = call["route"], call["checkpointed"]
            if call["kind"] == "evaluate":
                with torch.no_grad():
                    torch.testing.assert_close(
                        model(mine(batch), *arguments), reference(mine(batch), *arguments)
                    )
                continue
            if call["kind"] == "raise":
                with pytest.raises(ArithmeticError):
                    model(mine(batch), *arguments, raises=True)
                continue
            if call["kind"] == "raise in backward":
                interrupted = _Interrupt.apply(mine(batch).requires_grad_())
                with pytest.raises(ArithmeticError):
                    model(interrupted, *arguments).sum().backward()
                model.zero_grad()
                reference.zero_grad()
                continue
            model.set_requires_gradient_sync(call["syncs"])
            for each, x in ((model, mine(batch)), (reference, batch)):
                each(x, *arguments).square().mean().backward()
            if call["syncs"]:
                assert_same_gradients(model, reference)
                if call["steps"]:
                    step(optimizers)
    assert gathered_fqns(model) == []


def _all_calls(how, examples, kwargs):
    cases = st.lists(calls, min_size=2, max_size=6)
    for_all(cases, lambda case: _check_calls(case, how, kwargs), examples)


@pytest.mark.thin
@each_way
@either_transport
@pytest.mark.parametrize("bytes_ahead", [None, 1])
def test_random_sequences_compute_what_one_process_does(run_ranks, how, transport, bytes_ahead):
    run_ranks(2, _all_calls, how, 12, {"transport": transport, "bytes_ahead": bytes_ahead})


@pytest.mark.long
@each_way
@either_transport
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_random_sequences_compute_what_one_process_does(run_ranks, how, transport, ranks):
    run_ranks(ranks, _all_calls, how, 125, {"transport": transport}, timeout=300)


def _gathered_at_outputs(how, bytes_ahead, kwargs):
    """Returns the blocks that a second step has gathered so far at each block's output, then at the
    gradient of each.
    """
    model, _ = _sharded(how, bytes_ahead, reshard_after_forward=True, **kwargs)
    seen, logs = [], []

    def see(*_):
        with_weights = {f.split(".")[1] for f in gathered_in(logs[-1]) if f.startswith("blocks.")}
        seen.append(sorted(with_weights))

    def see_output(block, args, output):
        see()
        output.register_hook(see)

    for block in model.blocks:
        block.register_forward_hook(see_output)
    for seed in range(2):
        seen.clear()
        for part in ("forward", "backward"):
            with record_collectives() as log:
                logs.append(log)
                if part == "forward":
                    loss = model(mine(batch_of(4, 6, seed=seed)), range(4)).sum()
                else:
                    loss.backward()
    return seen


BLOCK = 4 * (6 * 6 + 6)  # bytes
UP_TO = [["0"], ["0", "1"], ["0", "1", "2"], ["0", "1", "2", "3"]]
FROM = [["3"], ["2", "3"], ["1", "2", "3"], ["0", "1", "2", "3"]]


@each_way
@either_transport
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_blocks_are_gathered_while_those_before_them_compute(run_ranks, how, transport, ahead):
    for seen in run_ranks(2, _gathered_at_outputs, how, ahead * BLOCK, {"transport": transport}):
        assert seen[:4] == [UP_TO[min(i + ahead, 3)] for i in range(4)]
        if transport == "c10d":
            assert seen[4:] == [FROM[min(i + ahead - 1, 3)] for i in range(4)]
        else:  # shared memory has what the forward has published
            assert seen[4:] == [[], *FROM[:3]]


@each_way
def test_a_gather_that_is_larger_than_the_limit_starts_alone(run_ranks, how):
    for seen in run_ranks(2, _gathered_at_outputs, how, 1, {"transport": "c10d"}):
        assert seen[:4] == [UP_TO[min(i + 1, 3)] for i in range(4)]
        assert seen[4:] == FROM


def _double(changed, *_):
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(2)


def _changed_in_forward(how, kwargs):
    model, reference = _sharded(how, **kwargs)

    for each in (model, reference):
        each.blocks[0].register_forward_hook(functools.partial(_double, each.blocks[2]))
    for seed in range(3):
        batch = batch_of(4, 6, seed=seed)
        for each, x in ((model, mine(batch)), (reference, batch)):
            each(x, range(4)).square().mean().backward()
        assert_same_gradients(model, reference)


@each_way
@either_transport
def test_a_block_that_changes_once_its_gather_has_started_is_gathered_anew(
    run_ranks, how, transport
):
    run_ranks(2, _changed_in_forward, how, {"transport": transport})


class _Chain(nn.Module):
    """Blocks, after the first of which another model runs."""

    def __init__(self, depth=3, width=64):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x, inner=None):
        for i, block in enumerate(self.blocks):
            x = block(x).tanh()
            if i == 0 and inner is not None:
                x = x + inner(x)
        return x


def _with_another_model_inside(how):
    chains = [_Chain(), _Chain()]
    (outer, reference), (inner, its_reference) = [
        shard(chain, chain.blocks, reshard_after_forward=True, transport="shared_memory")
        for chain in chains
    ]
    if how != "eager":
        for block in (*outer.blocks, *inner.blocks):
            block.compile(backend="zero3", options={"inductor": False})
    for seed in range(3):
        batch = batch_of(4, 64, seed=seed)
        outer(mine(batch), inner).square().mean().backward()
        reference(batch, its_reference).square().mean().backward()
        assert_same_gradients(outer, reference)
        assert_same_gradients(inner, its_reference)


@pytest.mark.gloo
@each_way
def test_a_gather_whose_place_another_model_has_taken_starts_again(run_ranks, how):
    run_ranks(2, in_little_memory, _with_another_model_inside, how)


def test_the_limit_is_that_of_the_graph_that_runs(one_rank):
    model = Routed()
    model, _ = shard(model, model.blocks)
    first, second = model.blocks[:2]
    for block, mb in ((first, 1), (second, 2)):
        block.compile(backend="zero3", options={"inductor": False, "gather_bucket_mb": mb})
    orders = model._zero3_group.model.gather_orders
    x = batch_of(4, 6)
    for route, mb in (([0], 1), ([1], 2), ([0], 1)):  # the last one compiles nothing
        model(x, route)
        assert orders.bytes_ahead == mb * 2**20


def _run_by_one_rank(how, kwargs):
    model, reference = _sharded(how, **kwargs)
    batch = batch_of(4, 6)
    for _ in range(2):
        model(mine(batch), range(4)).sum().backward()
    model.zero_grad()
    sharded = [model, *model.blocks]
    for each in sharded:
        each.unshard()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(mine(batch), range(4))  # gathers nothing
    for each in sharded:
        each.reshard()
    for each, x in ((model, mine(batch)), (reference, batch)):
        each(x, [0, 2, 1, 3]).square().mean().backward()
    assert_same_gradients(model, reference)


@either_transport
def test_a_forward_of_one_rank_that_gathers_nothing_changes_no_order(run_ranks, transport):
    run_ranks(2, _run_by_one_rank, "eager", {"transport": transport})


def _changed_by_one_rank():
    model, _ = _sharded("eager", transport="shared_memory")
    if dist.get_rank() == 0:
        model.blocks[0].register_forward_hook(functools.partial(_clamp, model.blocks[2]))
    for _ in range(3):
        model(mine(batch_of(4, 6)), range(4)).sum().backward()


def _clamp(changed, *_):
    with torch.no_grad():
        changed.weight.to_local().clamp_(-1, 1)


@pytest.mark.gloo
def test_a_block_that_one_rank_alone_changes_is_named(run_ranks):
    with pytest.raises(AssertionError, match=r"ranks wait for each other.*blocks\.2\.weight"):
        run_ranks(2, _changed_by_one_rank)
