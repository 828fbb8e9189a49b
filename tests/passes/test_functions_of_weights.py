"""Functions of weights and constants are computed again in the backward, and never saved whole."""

import pytest
import torch
import torch.nn.functional as F
from support.job import needs_a_job
from support.models import batch_of, compiled
from torch import nn
from torch._higher_order_ops import map, scan
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import capture_graphs, fully_shard


def _without_a_row(weight, x):
    changed = weight.clone()
    changed[0] = 0.0
    return changed


def _nested(weight):
    return torch.cond(weight.amax() > 0, torch.sin, torch.cos, (weight,))


def _random(weight):
    return weight * torch.rand_like(weight)


def _sum(total, row):
    total = total + row
    return total, total.clone()


FUNCTIONS = {
    "a number": lambda weight, x: weight * torch.tensor(2.0),
    "a tensor": lambda weight, x: weight / torch.as_tensor([2.0]),
    "rows": lambda weight, x: weight[[3, 2] * 8],
    "a row is written": _without_a_row,
    "the batch size": lambda weight, x: weight * (1 / x.shape[0]),
    "reductions": lambda weight, x: weight.amax(0, True) * weight.amax(1, True),
}
CALLS = {
    "cond": lambda weight, x: torch.cond(weight.sum() > 0, torch.sin, torch.cos, (weight,)),
    "cond in cond": lambda weight, x: torch.cond(weight.sum() > 0, _nested, torch.cos, (weight,)),
    "map": lambda weight, x: map(torch.sin, weight),
    "scan": lambda weight, x: scan(_sum, weight[0] * 0.0, weight)[1],
}


class _Model(nn.Module):
    def __init__(self, function, is_checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.function = function
        self.is_checkpointed = is_checkpointed

    def _multiply(self, x):
        return F.linear(x.sin(), self.function(self.weight, x))

    def forward(self, x):
        if self.is_checkpointed:
            return checkpoint(self._multiply, x, use_reentrant=False)
        return self._multiply(x)


def _large_tensors_saved(model, reference=None, of_input=True):
    """Takes two steps, and returns what their forwards save of the weights' size."""
    run = compiled(model, "interpreted")
    with capture_graphs() as graphs:
        for rows in (4, 5):
            x = batch_of(rows, 16).requires_grad_(of_input)
            for each in (run, reference) if reference else (run,):
                each(x).square().sum().backward()
    if reference:
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            if theirs.requires_grad:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    return [
        node
        for graph in graphs.forward
        for node in graph.graph_module.graph.output_node().all_input_nodes[1:]
        if node.op != "placeholder"
        and isinstance(node.meta["val"], torch.Tensor)
        and node.meta["val"].numel() >= 256
    ]


@needs_a_job
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_of_the_weights_size_is_saved(name, is_checkpointed):
    model = fully_shard(_Model(FUNCTIONS[name], is_checkpointed))
    assert not _large_tensors_saved(model, _Model(FUNCTIONS[name], False))


@needs_a_job
@pytest.mark.parametrize("name", CALLS)
def test_nor_is_what_a_condition_or_a_loop_computes(name):
    # torch has no such calls in checkpoints.
    model = fully_shard(_Model(CALLS[name], False))
    assert not _large_tensors_saved(model, _Model(CALLS[name], False))


class _Kept(nn.Module):
    """Multiplies by a product of a weight that stays gathered and one that does not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kept, self.other = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x):
        return F.linear(x.sin(), self.kept.weight.cos() * self.other.weight)


@needs_a_job
def test_nor_is_what_depends_on_a_weight_that_stays_gathered_too():
    model = _Kept()
    fully_shard(model.kept, reshard_after_forward=False)
    saved = _large_tensors_saved(fully_shard(model), _Kept())
    assert [node.name for node in saved] == ["kept_weight_full"] * 2


@needs_a_job
def test_random_results_are_saved():
    def function(weight, x):
        return torch.cond(weight.sum() > 0, _random, _random, (weight,))

    assert _large_tensors_saved(fully_shard(_Model(function, False)))


class _AfterAFrozenBlock(nn.Module):
    """A function of a weight behind a frozen block, checkpointed, that reduces its own weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = _Model(lambda weight, x: weight * weight.amax(1), True).requires_grad_(False)
        self.trained = _Model(lambda weight, x: weight.cumsum(0).sin(), False)

    def forward(self, x):
        return self.trained(self.frozen(x))


@needs_a_job
def test_a_frozen_block_leaves_functions_of_other_weights_alone():
    model = _AfterAFrozenBlock()
    fully_shard(model.frozen)
    assert not _large_tensors_saved(fully_shard(model), _AfterAFrozenBlock(), of_input=False)
