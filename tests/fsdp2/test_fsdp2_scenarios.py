"""Scenarios of FSDP2's own tests that no other test here has: forwards and backwards in unusual
numbers, orders and parts, eager and compiled, compared with one process of plain PyTorch.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from support.fsdp2_scenarios import fqns
from support.models import (
    Block,
    Stack,
    assert_same_gradients,
    assert_same_parameters,
    assert_same_step,
    assert_same_steps,
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
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import fully_shard, record_collectives

# ---- inputs and outputs of modules


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class InContainers(nn.Module):
    """A module that takes and returns a dict of a list of a tuple and a named tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, tree):
        (x,), pair = tree["all"]
        x, y, z = (self.linear(each).tanh() for each in (x, *pair))
        return {"all": [(x,), Pair(y, z)]}


@dataclass
class Inner:
    x: torch.Tensor


@dataclass
class Outer:
    inner: Inner
    y: torch.Tensor
    name: str = ""


class InDataclasses(InContainers):
    """A module that takes and returns a dataclass in a dataclass."""

    def forward(self, outer):
        x, y = (self.linear(each).tanh() for each in (outer.inner.x, outer.y))
        return Outer(Inner(x), y, outer.name)


class Through(nn.Module):
    """A module that passes its input, in containers, through two modules of class ``kind``."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x):
        if self.kind is InDataclasses:
            tree = Outer(Inner(x), 2 * x, "kept")
        else:
            tree = {"all": [(x,), Pair(2 * x, 3 * x)]}
        for layer in self.layers:
            tree = layer(tree)
        if self.kind is InDataclasses:
            assert tree.name == "kept"
            return tree.inner.x + tree.y
        (x,), (y, z) = tree["all"]
        return x + y + z


def _in_containers(how, kind):
    model = Through(kind)
    # Casts must reach nested tensors: inputs to float64, and outputs back.
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)
    model, reference = shard(model, model.layers, mp_policy=policy)
    assert_same_steps(model, reference, how, 4, 8)


@each_way
@pytest.mark.thin
@pytest.mark.parametrize("kind", [InContainers, InDataclasses])
def test_activations_travel_in_containers(run_ranks, how, kind):
    run_ranks(2, _in_containers, how, kind)


# ---- which outputs, in which order, how often


class Branching(nn.Module):
    """A checkpointed trunk, two branches, and a module that never runs."""

    def __init__(self):
        super().__init__()
        self.trunk = Block(8)
        self.left, self.right, self.idle = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = checkpoint(self.trunk, x, use_reentrant=False)
        return self.left(x).tanh(), self.right(x).tanh()


def _branching(how):
    model = Branching()
    # Nested groups.
    blocks = [model.trunk.up, model.trunk, model.left, model.idle]
    model, reference = shard(model, blocks)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)

    def compare(backward):
        """Compares ``backward(forward, batch)`` of both models; ``batch(seed)`` returns rows."""
        backward(run, lambda seed: mine(batch_of(4, 8, seed=seed)))
        backward(reference, lambda seed: batch_of(4, 8, seed=seed))
        if how != "eager":  # compiled: parameters without a gradient get zeros
            for branch in (reference.left, reference.right):
                for parameter in branch.parameters():
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
        assert_same_gradients(model, reference)
        assert model.idle.weight.grad is None
        step(optimizers)
        assert_same_parameters(model, reference)

    def of_both(forward, batch):
        left, right = forward(batch(0))
        (left * right + left * left).mean().backward()

    def of_one(forward, batch):
        forward(batch(1))[0].square().mean().backward()

    def of_one_after_the_other(forward, batch):
        left, right = forward(batch(2))
        right.square().mean().backward(retain_graph=True)
        left.square().mean().backward()

    def of_two_forwards(forward, batch):
        first, second = forward(batch(3)), forward(batch(4))
        with torch.no_grad():
            forward(batch(5))
        (first[0].square().mean() - second[1].mean() + second[0].mean()).backward()

    def of_two_forwards_in_turn(forward, batch):
        losses = [forward(batch(seed))[0].square().mean() for seed in (6, 7)]
        for loss in losses:  # not the last one first
            loss.backward()

    compare(of_both)
    compare(of_one)
    compare(of_one_after_the_other)
    compare(of_two_forwards)
    compare(of_two_forwards_in_turn)


@each_way
def test_backward_may_go_through_parts_of_forwards(run_ranks, how):
    run_ranks(2, _branching, how)


class Looping(nn.Module):
    """A module that runs layers several times, also without gradients, and a frozen layer. It has a
    block in two places and a weight in two groups.
    """

    def __init__(self):
        super().__init__()
        self.trained, self.frozen, self.tied = (nn.Linear(8, 8) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.tied.weight = self.trained.weight
        block = nn.Linear(8, 8)
        self.twice = nn.Sequential(block, nn.Tanh(), block)

    def forward(self, x):
        for _ in range(2):
            x = self.frozen(torch.relu(self.trained(x)))
            with torch.no_grad():
                x += torch.relu(self.trained(x))
        return self.tied(self.twice(x))


def _looping(how):
    model = Looping()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    blocks = [model.trained, model.frozen, model.tied, model.twice[0]]
    model, reference = shard(model, blocks)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
    assert model.tied.weight is model.trained.weight
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed in range(2):
        batch = batch_of(4, 8, seed=seed)
        with record_collectives() as log:
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert sorted(fqns(log, "reduce_scatter")) == sorted(trained)


@each_way
def test_sharded_modules_may_run_several_times_in_a_forward(run_ranks, how):
    run_ranks(2, _looping, how)


# ---- which parameters train


class Tuned(Stack):
    def forward(self, x):
        return self.head(checkpoint(self.blocks[0], x, use_reentrant=False))


def _fine_tuned(how):
    model = Tuned(depth=1)
    model, reference = shard(model, model.blocks)
    run = compiled(model, how)
    optimizers = optimizers_of(model, reference)
    for seed, everything in enumerate((False, False, True)):
        for m in (model, reference):
            for name, parameter in m.named_parameters():
                parameter.requires_grad_(everything or "bias" in name)
        batch = batch_of(4, 8, seed=seed)
        with record_collectives() as log:
            assert_same_step(model, reference, batch, run=run, optimizers=optimizers)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert sorted(fqns(log, "reduce_scatter")) == sorted(trained)
        with torch.no_grad():
            assert_close(run(batch), reference(batch))


@pytest.mark.first(how="eager")
@each_way
def test_biases_alone_may_train_and_then_everything(run_ranks, how):
    run_ranks(2, _fine_tuned, how)


# ---- micro-batches


def _in_parts(model, reference, run, optimizers, unsynced, set_to_none):
    """Takes a step of three micro-batches and returns how often each parameter was reduced.
    ``unsynced(is_last)`` sets which gradients wait for the last micro-batch.
    """
    with record_collectives() as log:
        for micro in range(3):
            unsynced(micro == 2)
            batch = batch_of(4, 8, seed=micro)
            mean_square(run, mine(batch)).backward()
            mean_square(reference, batch).backward()
            model.train(micro == 1).float().to("cpu")  # does not change waiting gradients
    assert_same_gradients(model, reference)
    step(optimizers, set_to_none)
    assert_same_parameters(model, reference)
    reduced = fqns(log, "reduce_scatter")
    return {name: reduced.count(name) for name in reduced}


def _interleaved(model, reference, run, optimizers):
    """Runs each backward one forward late; parameters are gathered first and reduced once."""
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    waiting = []
    with record_collectives() as log:
        for module in (*model.blocks, model):
            module.unshard(async_op=True)
        for micro in range(3):
            batch = batch_of(4, 8, seed=micro)
            waiting.append(mean_square(run, mine(batch)))
            mean_square(reference, batch).backward()
            if micro:
                waiting.pop(0).backward()
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(True)
        waiting.pop().backward()
    assert_same_gradients(model, reference)
    step(optimizers)
    assert_same_parameters(model, reference)
    every = sorted(name for name, _ in model.named_parameters())
    assert sorted(fqns(log, "all_gather")) == every
    assert sorted(fqns(log, "reduce_scatter")) == every


def _micro_batches(how):
    model = Stack()
    model, reference = shard(model, model.blocks, reshard_after_forward=False)
    both = model, reference
    run = compiled(model, how)
    optimizers = optimizers_of(*both)
    block = [name for name, _ in model.named_parameters() if "blocks.0" in name]
    head = [name for name, _ in model.named_parameters() if "head" in name]
    rest = [n for n, _ in model.named_parameters() if n not in block and n not in head]

    def times(block_s, rest_s, head_s):
        counts = dict.fromkeys(block, block_s) | dict.fromkeys(rest, rest_s)
        return counts | dict.fromkeys(head, head_s)

    first = model.blocks[0].set_requires_gradient_sync
    reduced = _in_parts(*both, run, optimizers, first, set_to_none=False)
    assert reduced == times(1, 3, 3)

    def outermost(sync):
        model.set_requires_gradient_sync(sync, recurse=False)

    reduced = _in_parts(*both, run, optimizers, outermost, set_to_none=False)
    assert reduced == times(3, 3, 1)
    every = model.set_requires_gradient_sync
    assert _in_parts(*both, run, optimizers, every, set_to_none=True) == times(1, 1, 1)
    _interleaved(*both, run, optimizers)


@each_way
def test_micro_batches_wait_block_by_block_and_interleave(run_ranks, how):
    run_ranks(2, _micro_batches, how)


class Chunked(nn.Module):
    """A model whose head, tied to its embedding, runs separately."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.norm(self.body(self.embed(tokens)))


def _chunked(how):
    """Computes the loss one chunk of the hidden states at a time."""
    model = Chunked()
    reference = copy.deepcopy(model)
    fully_shard([model.embed, model.norm, model.head], reshard_after_forward=False)
    fully_shard(model)
    body, head = compiled(model, how), compiled(model.head, how)
    optimizers = optimizers_of(model, reference)

    def backward(body, head, tokens):
        hidden = body(tokens)
        gradients = []
        for chunk in hidden.detach().chunk(4, dim=1):
            chunk = chunk.contiguous().requires_grad_()
            (mean_square(head, chunk) / 4).backward()
            gradients.append(chunk.grad)
        return hidden, torch.cat(gradients, dim=1)

    for seed in range(4):
        tokens = torch.randint(17, (4, 8), generator=torch.Generator().manual_seed(seed))
        last = seed % 2 == 1
        model.set_requires_gradient_sync(last)
        model.head.set_reshard_after_backward(False)
        with record_collectives() as log:
            hidden, gradient = backward(body, head, mine(tokens))
        assert fqns(log, "all_gather").count("embed.weight") == 1
        model.head.set_reshard_after_backward(True)
        model.head.reshard()
        hidden.backward(gradient)
        hidden, gradient = backward(reference, reference.head, tokens)
        hidden.backward(gradient)
        if last:
            assert_same_gradients(model, reference)
            step(optimizers)
            assert_same_parameters(model, reference)


@each_way
def test_a_head_may_run_by_itself_in_chunks(run_ranks, how):
    run_ranks(2, _chunked, how)
