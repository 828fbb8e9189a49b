"""Activation checkpointing: recomputation in backward is correct, and gathers as expected."""

import functools
from collections import Counter

import pytest
import torch
from support.job import needs_a_job
from support.models import (
    Stack,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    optimizers_of,
    shard,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives


def _save_matmuls(context, op, *args, **kwargs):
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    save = op in matmuls
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


_selective = functools.partial(create_selective_checkpoint_contexts, _save_matmuls)


def _beside_its_forward(block, x):
    """Computes a block's forward without calling the block."""
    return x + block.down(nn.functional.gelu(block.up(block.norm(x))))


# Ways to run a block on activations.
WAYS = {
    "as it is": lambda block, x: block(x),
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "selective": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=_selective),
    "of a function": lambda block, x: checkpoint(
        _beside_its_forward, block, x, use_reentrant=False
    ),
}


class _Checkpointed(Stack):
    def __init__(self, way):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.way = WAYS[way]

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.way(block, x)
        return self.head(x)


def _train(model, reference, run):
    """Returns how often each parameter was gathered in the last step."""
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        with record_collectives() as log:
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert isinstance(model.head.weight, DTensor)
    reduced = Counter(fqn for c in log if c.op == "reduce_scatter" for fqn in c.params)
    assert set(reduced.values()) == {1}
    return Counter(fqn for c in log if c.op == "all_gather" for fqn in c.params)


def _checkpoint_blocks(how, way):
    model = _Checkpointed(way)
    model, reference = shard(model, model.blocks, reshard_after_forward=True)
    gathered = _train(model, reference, compiled(model, how))
    if how == "eager" and way == "as it is":
        return  # a bias is not saved, and not gathered again
    in_blocks = {n for fqn, n in gathered.items() if "blocks" in fqn}
    assert in_blocks == {2}, gathered


@pytest.mark.thin
@each_way
@pytest.mark.parametrize("way", WAYS)
def test_a_backward_that_recomputes_gathers_no_more_than_one_that_does_not(run_ranks, how, way):
    run_ranks(2, _checkpoint_blocks, how, way)


class _StemTwice(_Checkpointed):
    def forward(self, x):
        return super().forward(self.stem(x))


def _reductions(how):
    model = _StemTwice("not reentrant")
    model, reference = shard(model, [model.stem, *model.blocks])  # the stem is read anew
    with record_collectives() as log:
        assert_same_step(model, reference, batch_of(4, 8), run=compiled(model, how))
    return Counter(fqn for c in log if c.op == "reduce_scatter" for fqn in c.params)


@each_way
def test_a_backward_that_recomputes_reduces_each_parameter_once(run_ranks, how):
    for reductions in run_ranks(2, _reductions, how):
        assert set(reductions.values()) == {1}


def _save_tanh(context, op, *args, **kwargs):
    save = op == torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class _TanhOfItsWeight(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.how = how

    def _multiply(self, x):
        return x @ self.weight.tanh()

    def forward(self, x):
        return checkpoint(self._multiply, x, **self.how) if self.how else self._multiply(x)


_SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _save_tanh)


@needs_a_job
@pytest.mark.parametrize(
    ("how", "is_saved"),
    [
        ({}, False),
        ({"use_reentrant": False}, False),
        ({"use_reentrant": False, "context_fn": _SELECTIVE}, True),
    ],
    ids=["as it is", "checkpointed", "saved"],
)
def test_a_function_of_a_weight_is_saved_only_if_a_selective_checkpoint_says_so(how, is_saved):
    model = fully_shard(_TanhOfItsWeight(**how))
    with capture_graphs() as graphs:
        compiled(model, "interpreted")(batch_of(4, 8).requires_grad_()).sum().backward()
    again = graphs.backward[0].graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.tanh.default
    )
    assert len(again) == (0 if is_saved else 1)


class _MaskOfItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def _multiply(self, x):
        weight = self.weight / self.weight.abs().amax(1, keepdim=True)
        return (x.T @ x) * (weight * torch.ones(8, 8).tril())

    def forward(self, x):
        return checkpoint(self._multiply, x, use_reentrant=False)


@needs_a_job
def test_what_functions_of_a_weight_read_is_not_saved_for_them():
    run = compiled(fully_shard(_MaskOfItsWeight()), "interpreted")
    x = batch_of(4, 8).requires_grad_()
    with capture_graphs() as graphs:
        run(x).sum().backward()
    saved = graphs.forward[0].graph_module.graph.output_node().all_input_nodes[1:]
    assert {node.op for node in saved} == {"placeholder"}, saved


def _wrap():
    model = Stack()
    model.requires_grad_(True)
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.blocks))
    model, reference = shard(model, model.blocks)
    gathered = _train(model, reference, model)
    assert {n for fqn, n in gathered.items() if "blocks" in fqn} == {2}, gathered


def test_blocks_in_torchs_checkpoint_wrapper_are_sharded(run_ranks):
    run_ranks(2, _wrap)


def _checkpoint_whole(how, use_reentrant):
    model = Stack()
    model, reference = shard(model, model.blocks, reshard_after_forward=True, transport="c10d")
    run = compiled(model, how)

    def checkpointed(x):
        x = x.requires_grad_()  # otherwise a reentrant checkpoint returns no gradient
        return checkpoint(run, x, use_reentrant=use_reentrant)

    gathered = _train(model, reference, checkpointed)
    assert set(gathered.values()) <= {2, 3}, gathered


@pytest.mark.parametrize(
    ("how", "use_reentrant"),
    [
        ("interpreted", False),
        ("eager", False),
        pytest.param("eager", True, marks=pytest.mark.more),
    ],
)
def test_the_outermost_module_is_checkpointed(run_ranks, how, use_reentrant):
    run_ranks(2, _checkpoint_whole, how, use_reentrant)


def _count_flops():
    model = Stack()
    model, reference = shard(model, model.blocks)
    counts = []
    for each in (model, reference):
        with FlopCounterMode(display=False) as counter:
            each(batch_of(4, 8)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_modes_that_see_operators_see_those_of_the_model(run_ranks):
    run_ranks(2, _count_flops)
