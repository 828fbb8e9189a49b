"""Weights that a forward reads without gradients, or freezes for a part of itself."""

import pytest
import torch
from support.job import needs_a_job
from support.models import (
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
    shard,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from deepcompile_zero3 import Zero3Error, fully_shard


class _Adversary(nn.Module):
    """Its second layer trains on what the first makes, and the first by the second, frozen."""

    def __init__(self, frozen_first):
        super().__init__()
        self.make, self.judge = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen_first = frozen_first

    def _frozen(self, made):
        self.judge.requires_grad_(False)
        judged = self.judge(made).sigmoid()
        self.judge.requires_grad_(True)
        return judged

    def forward(self, x):
        made = self.make(x).tanh()
        if self.frozen_first:
            return torch.cat([self._frozen(made), self.judge(made.detach())], dim=1)
        return torch.cat([self.judge(made.detach()), self._frozen(made)], dim=1)


class _Scaled(nn.Module):
    """Reads its weight without gradients first, and uses what it has read."""

    def __init__(self, way):
        super().__init__()
        self.weight = nn.Parameter(batch_of(6, 6, seed=1))
        self.way = way

    def _by_value(self, x):
        with torch.no_grad():
            weight = self.weight
            scale = weight.abs().max()
        return x @ weight / scale

    def _by_number(self, x):
        with torch.no_grad():
            scale = self.weight.abs().sum().item()
        return x @ self.weight / scale

    def _by_mean(self, x):
        with torch.no_grad():
            scale = self.weight.abs().mean()
        return (x @ (self.weight / scale)).sin()

    def forward(self, x):
        if self.way == "value":
            return self._by_value(x)
        if self.way == "number":
            return self._by_number(x)
        if self.way.startswith("value, "):
            return checkpoint(self._by_value, x.sin(), use_reentrant=self.way == "value, reentrant")
        use = self._by_number if self.way == "number, checkpointed" else self._by_mean
        return checkpoint(use, x.sin(), use_reentrant=False)


class _ProductByModule(torch.autograd.Function):
    """A product whose backward reads the weight in the module, in place of one that it saved."""

    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.module.weight.T, x.T @ gradient, None


class _ReadAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(batch_of(6, 6, seed=1))

    def forward(self, x):
        return _ProductByModule.apply(x, self.weight, self)


MODELS = {
    "frozen first": lambda: _Adversary(True),
    "frozen then": lambda: _Adversary(False),
    "value": lambda: _Scaled("value"),
    "number": lambda: _Scaled("number"),
    "number, checkpointed": lambda: _Scaled("number, checkpointed"),
    "value, checkpointed": lambda: _Scaled("value, checkpointed"),
    "mean, checkpointed": lambda: _Scaled("mean, checkpointed"),
    "custom backward": _ReadAgain,
    "value, reentrant": lambda: _Scaled("value, reentrant"),
}


def _trains(how, transport, name, settings):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), MODELS[name]())
    model, reference = shard(layers, transport=transport, **settings)
    for seed in range(2):
        batch = batch_of(4, 6, seed=seed)
        assert_same_step(model, reference, batch, run=compiled(model, how))


@pytest.mark.thin
@each_way
@either_transport
@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}], ids=["", "kept"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_depend_on_uses_not_on_reads(run_ranks, how, transport, name, settings):
    run_ranks(2, _trains, how, transport, name, settings)


def _read_in_hooks(how):
    """Returns the types of weights that hooks of a backward have read."""
    blocks = nn.Sequential(_ReadAgain(), _ReadAgain(), nn.Linear(6, 6))
    model, _ = shard(blocks, blocks[:2])
    types = []

    def look(*_):
        types.extend(type(layer.weight) for layer in blocks)

    model.register_forward_hook(lambda _, args, output: output.register_hook(look) and None)
    run = compiled(model, how)
    if how == "eager":
        blocks[0].register_full_backward_hook(look)
        blocks[1].weight.register_post_accumulate_grad_hook(look)
        hidden = checkpoint(blocks[:2], mine(batch_of(4, 6)).requires_grad_(), use_reentrant=True)
        hidden.register_hook(look)
        hidden.sum().backward()
    output = run(mine(batch_of(4, 6)))
    output.register_hook(look)
    output.sum().backward()
    return types


@each_way
def test_hooks_of_a_backward_read_dtensors(run_ranks, how):
    for types in run_ranks(2, _read_in_hooks, how):
        assert len(types) >= (18 if how == "eager" else 3)
        assert set(types) == {DTensor}


def _freezes_after_a_sum(how, transport, thaws):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model, reference = shard(layers, transport=transport)
    run = compiled(model, how)

    def backward(seed):
        batch = batch_of(4, 6, seed=seed)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()

    model.set_requires_gradient_sync(False)
    backward(0)
    model.set_requires_gradient_sync(True)
    for each in (model, reference):
        each[2].requires_grad_(False)
    backward(1)
    assert_same_gradients(model, reference)
    if thaws:
        for each in (model, reference):
            each[2].requires_grad_(True)
        backward(2)
        assert_same_gradients(model, reference)


@pytest.mark.thin
@each_way
@either_transport
@pytest.mark.parametrize("thaws", [True, False])
def test_what_was_summed_before_a_parameter_was_frozen_is_kept(run_ranks, how, transport, thaws):
    run_ranks(2, _freezes_after_a_sum, how, transport, thaws)


def _is_frozen_before_its_backward(how, transport):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model, reference = shard(layers, transport=transport)
    losses = (
        mean_square(compiled(model, how), mine(batch_of(4, 6))),
        mean_square(reference, batch_of(4, 6)),
    )
    for each, loss in zip((model, reference), losses, strict=True):
        each[2].requires_grad_(False)
        loss.backward()
    assert_same_gradients(model, reference)


@each_way
@either_transport
def test_a_parameter_that_is_frozen_before_its_backward_gets_no_gradient(run_ranks, how, transport):
    run_ranks(2, _is_frozen_before_its_backward, how, transport)


class _OtherData(nn.Linear):
    """Computes with other data from a forward on, as layers do that pack or convert a weight."""

    def __init__(self, change):
        super().__init__(4, 4, bias=False)
        self.change = change

    def forward(self, x):
        self.weight.data = self.change(self.weight.data)
        return x @ self.weight.to(x.dtype)


@needs_a_job
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_data_that_replace_a_gathered_copy_are_refused(reshard_after_forward):
    for change in (lambda data: data, lambda data: data.bfloat16()):
        model = fully_shard(_OtherData(change), reshard_after_forward=reshard_after_forward)
        model(torch.ones(1, 4)).sum().backward()
    replaced = r"weight' .* its .data was replaced"
    for change in (torch.clone, torch.t):
        model = fully_shard(_OtherData(change), reshard_after_forward=reshard_after_forward)
        with torch.no_grad(), pytest.raises(Zero3Error, match=replaced):
            model(torch.ones(1, 4))
    model = fully_shard(nn.Linear(4, 4), reshard_after_forward=reshard_after_forward)
    model.unshard()
    model.weight.data = model.weight.data.clone()
    with pytest.raises(Zero3Error, match=replaced):
        model(torch.ones(1, 4))
    model(torch.ones(1, 4)).sum().backward()
