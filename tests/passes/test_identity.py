"""A parameter is identified by its placeholder, not by a name: equal blocks share compiled graphs,
and a backward needs no module.
"""

import gc
import weakref

import pytest
import torch
from support.models import (
    Block,
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    compiled_each_way,
    each_way,
    either_transport,
    mean_square,
    mine,
    optimizers_of,
    shard,
)
from support.partitioners import DefaultPartition
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives
from deepcompile_zero3.sharding import module
from deepcompile_zero3.sharding.module_parameters import parameters_of

# ---- equal blocks


def _compile_blocks(model, how):
    for block in model.blocks:
        block.compile(backend="zero3", options={"inductor": how == "zero3"})


def _twins(how, transport, depth):
    """Returns the number of graphs for ``depth`` blocks; compares training with one process."""
    model = Stack(width=8, depth=depth)
    model, reference = shard(model, model.blocks, transport=transport)
    _compile_blocks(model, how)
    optimizers = optimizers_of(model, reference)
    with capture_graphs() as graphs:
        for seed in range(3):
            batch = batch_of(4, 8, seed=seed).requires_grad_()
            with record_collectives() as log:
                mean_square(model, mine(batch)).backward()
            mean_square(reference, batch).backward()
            assert_same_gradients(model, reference)
            reduced = [fqn for c in log if c.op == "reduce_scatter" for fqn in c.params]
            assert sorted(reduced) == sorted(name for name, _ in model.named_parameters())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return len(graphs.forward), len(graphs.backward), graphs.backward[0].text


@compiled_each_way
@either_transport
def test_equal_blocks_are_compiled_once(run_ranks, how, transport):
    # More blocks than Dynamo's recompile limit.
    assert torch._dynamo.config.recompile_limit < 32
    for forwards, backwards, text in run_ranks(2, _twins, how, transport, 32):
        assert (forwards, backwards) == (1, 1)
        assert "reduce_grad(" in text
        assert "blocks" not in text  # names are relative to the compiled module


def _wrapped(wrap):
    """Returns the number of graphs for more blocks than Dynamo's recompile limit."""
    model = Stack(depth=torch._dynamo.config.recompile_limit + 1)
    model, reference = shard(model, model.blocks)
    zero3 = {"backend": "zero3", "options": {"inductor": False}, "fullgraph": True}
    other = fully_shard(Block(8), mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    blocks = [torch.compile(wrap(block), **zero3) for block in (*model.blocks, other)]
    model.blocks = nn.ModuleList(blocks[:-1])
    batch = batch_of(4, 8).requires_grad_()
    with capture_graphs() as graphs:
        mean_square(model, mine(batch)).backward()
    mean_square(reference, batch).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(ours.grad.full_tensor(), theirs.grad)
    assert blocks[-1](batch).dtype == torch.float64  # a graph of its own
    return len(graphs.forward), len(graphs.backward)


def _as_it_is(block):
    return block


@pytest.mark.parametrize(
    "wrap", [_as_it_is, pytest.param(checkpoint_wrapper, marks=pytest.mark.more)]
)
def test_equal_blocks_that_are_wrapped_are_compiled_once(run_ranks, wrap):
    assert run_ranks(2, _wrapped, wrap) == [(1, 1)] * 2


def _unequal(transport):
    """Returns the number of graphs, and the dtypes of reductions, for blocks that differ in their
    shards only; two blocks of each kind are alike.
    """
    model = Stack(depth=6)
    for block in model.blocks[4:]:
        block.up.weight.grad_dtype = None
    for number, block in enumerate(model.blocks):
        wire = torch.bfloat16 if number in (2, 3) else None
        policy = MixedPrecisionPolicy(reduce_dtype=wire)
        fully_shard(block, mp_policy=policy, transport=transport)
    fully_shard(model, transport=transport)
    _compile_blocks(model, "interpreted")
    with capture_graphs() as graphs, record_collectives() as log:
        mean_square(model, mine(batch_of(4, 8).requires_grad_())).backward()
    wires = {fqn: c.dtype for c in log if c.op == "reduce_scatter" for fqn in c.params}
    return len(graphs.forward), [wires[f"blocks.{n}.up.weight"] for n in range(6)]


@pytest.mark.first(transport="c10d")
@either_transport
def test_blocks_that_shape_graphs_differently_share_none(run_ranks, transport):
    for forwards, wires in run_ranks(2, _unequal, transport):
        assert forwards == 3
        assert wires == [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float32] * 2


def _changed(transport):
    model, reference = shard(stack := Stack(depth=3), stack.blocks, transport=transport)
    _compile_blocks(model, "interpreted")
    compilations = []
    for change in (
        lambda: None,
        lambda: model.blocks[1].set_reshard_after_forward(False),
        lambda: model.blocks[2].set_reshard_after_forward(False),  # like the previous block
    ):
        change()
        batch = batch_of(4, 8).requires_grad_()
        with capture_graphs() as graphs:
            mean_square(model, mine(batch)).backward()
        mean_square(reference, batch).backward()
        assert_same_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
        compilations.append(len(graphs.forward))
    return compilations


@pytest.mark.first(transport="shared_memory")
@either_transport
def test_one_of_equal_blocks_may_change(run_ranks, transport):
    for compilations in run_ranks(2, _changed, transport):
        assert compilations == [1, 1, 0]


# ---- lifetimes


def _without_its_model(how, transport):
    """Compares a step whose backward runs after the model is freed with one process."""
    model, reference = shard(stack := Stack(), stack.blocks, transport=transport)
    run = compiled(model, how)
    batch = batch_of(4, 8)
    parameters = dict(model.named_parameters())
    gone = weakref.ref(model)
    loss = mean_square(run, mine(batch))
    del model, run, stack
    torch._dynamo.reset()  # guards keep objects alive
    gc.collect()
    assert gone() is None
    loss.backward()
    mean_square(reference, batch).backward()
    for fqn, whole in reference.named_parameters():
        torch.testing.assert_close(parameters[fqn].grad.full_tensor(), whole.grad)
    # All that the loss owned is freed with it.
    alive = [weakref.ref(parameter) for parameter in parameters.values()]
    del loss, parameters
    gc.collect()
    assert not any(parameter() is not None for parameter in alive)


@each_way
@either_transport
def test_a_backward_needs_no_module(run_ranks, how, transport):
    run_ranks(2, _without_its_model, how, transport)


def _twin_of_a_deleted_one(transport):
    first, second = (fully_shard(Block(8), transport=transport) for _ in range(2))
    for block in (first, second):
        block.compile(backend="zero3", options={"inductor": False})
    x = torch.ones(2, 8, requires_grad=True)
    with capture_graphs() as graphs:
        first(x).sum().backward()
        parameter = weakref.ref(parameters_of(first.up)["weight"])
        del first, block
        gc.collect()
        second(x).sum().backward()
    assert parameter() is None  # a compiled graph keeps no parameter alive
    assert second.up.weight.grad is not None
    return len(graphs.forward)


@pytest.mark.first(transport="c10d")
@either_transport
def test_a_graph_outlives_the_block_that_it_was_compiled_for(run_ranks, transport):
    for forwards in run_ranks(2, _twin_of_a_deleted_one, transport):
        assert forwards <= 2  # guards of a deleted block may be freed with it


# ---- twins that are tied


class _Pair(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.one, self.two = (nn.Linear(8, 8, bias=False) for _ in range(2))
        if tied:
            self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def _tied_beside_untied(transport, how):
    pairs = [_Pair(tied=False), _Pair(tied=True)]
    model = nn.Sequential(*pairs)
    model, reference = shard(model, pairs, transport=transport)
    for pair in model:
        pair.compile(backend="zero3", options={"inductor": how == "zero3"})
    optimizers = optimizers_of(model, reference)
    for seed in range(3):
        assert_same_step(model, reference, batch_of(4, 8, seed=seed), optimizers=optimizers)


@compiled_each_way
@either_transport
def test_a_pair_that_is_tied_beside_one_that_is_not(run_ranks, how, transport):
    run_ranks(2, _tied_beside_untied, transport, how)


# ---- any partitioner of the joint graph


class _Returns(nn.Module):
    """A module that returns an input, a result twice, and a result without gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return x, y, y, y.detach() + 1


def _partitioned(transport, of, config, budget, keep):
    model = Stack(depth=2) if of == "stack" else _Returns()
    blocks = model.blocks if of == "stack" else ()
    model, reference = shard(model, blocks, transport=transport, reshard_after_forward=keep)
    if config == "default_partition":
        config = {"custom_partitioner_fn": DefaultPartition("default")}
    run = compiled(model, "zero3", keep_mb=64, inductor_config=config or {})
    loss = mean_square if of == "stack" else lambda model, x: model(x)[1].square().mean()
    before = functorch_config.activation_memory_budget
    functorch_config.activation_memory_budget = budget
    try:
        for seed in range(2):
            batch = batch_of(4, 8, seed=seed).requires_grad_(seed > 0)
            assert_same_step(model, reference, batch, run=run, loss=loss)
            model.zero_grad()
            reference.zero_grad()
    finally:
        functorch_config.activation_memory_budget = before


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("of", "config", "budget", "keep"),
    [
        ("returns", None, 0.5, False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("stack", "default_partition", 1.0, None),
                ("returns", "default_partition", 1.0, False),
                ("stack", None, 0.0, None),
                ("stack", None, 0.5, False),
                ("returns", None, 0.0, None),
            ]
        ),
    ],
)
def test_any_partitioner_knows_whose_a_gradient_is(run_ranks, of, config, budget, keep):
    for transport in ("shared_memory", "c10d"):
        run_ranks(2, _partitioned, transport, of, config, budget, keep)


# ---- traces


def _compile_and_count_globals():
    """Compiles a model of 50 parameters; returns how many globals Dynamo left in our module."""
    model, _ = shard(Stack(width=8, depth=8))
    before = len(vars(module))
    compiled(model, "interpreted")(batch_of(2, 8)).sum().backward()
    return len(vars(module)) - before


def test_a_trace_leaves_no_global_for_each_parameter(run_ranks):
    assert max(run_ranks(2, _compile_and_count_globals)) < 20
