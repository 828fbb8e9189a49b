"""Transforms of torch.func around forwards and inside of them."""

import contextlib

import pytest
import torch
from support.job import needs_a_job
from support.models import assert_same_gradients, batch_of, compiled, shard
from torch import nn
from torch.testing import assert_close

from deepcompile_zero3.torch_release import RELEASE

_NO_HOOKS = "torch.func"


@needs_a_job
def test_a_forward_may_be_transformed_by_torch_func():
    model, reference = shard(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)))
    x, tangent = batch_of(2, 8), batch_of(2, 8, seed=1)
    ours = torch.func.jvp(model, (x,), (tangent,))
    assert_close(ours, torch.func.jvp(reference, (x,), (tangent,)))
    constant = torch.func.jvp(lambda unused: model(x), (tangent,), (tangent,))
    assert_close(constant, (reference(x), torch.zeros(2, 4)))


def _grad(function, x):
    return torch.func.grad(lambda y: function(y).square().sum())(x)


def _vjp(function, x):
    result, backward = torch.func.vjp(function, x)
    return backward(result)[0]


def _jacrev(function, x):
    return torch.func.vmap(torch.func.jacrev(function))(x).sum(1)


def _hessian(function, x):
    return torch.func.hessian(lambda y: function(y).sin().sum())(x).sum((2, 3))


def _jvp(function, x):
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


def _jvp_of_vmap(function, x):
    return _jvp(torch.func.vmap(function), x)


_REVERSE = (_grad, _vjp, _jacrev, _hessian)


class _Differentiates(nn.Module):
    """Two layers, and a derivative of a function of results or of the first layer."""

    def __init__(self, transform, reads_parameters):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 4)
        self.transform, self.reads_parameters = transform, reads_parameters

    def forward(self, x):
        y = self.inner(x)
        return self.outer(y + self.transform(self.inner if self.reads_parameters else torch.sin, y))


def _check(run, model, reference, x):
    for module in (run, reference):
        module(x).square().sum().backward()
    assert_same_gradients(model, reference)


@pytest.mark.thin
@needs_a_job
@pytest.mark.parametrize("reads_parameters", [False, True])
@pytest.mark.parametrize("transform", [*_REVERSE, _jvp, _jvp_of_vmap])
def test_transforms_in_an_eager_forward(transform, reads_parameters):
    model, reference = shard(_Differentiates(transform, reads_parameters))
    x = batch_of(2, 8)
    with torch.no_grad():
        assert_close(model(x), reference(x))
    without_hooks = contextlib.nullcontext()
    if transform in _REVERSE:
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            model(x)
        without_hooks = torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS)
    with without_hooks:
        _check(model, model, reference, x)


@pytest.mark.thin
@needs_a_job
@pytest.mark.parametrize("reads_parameters", [False, True])
@pytest.mark.parametrize("transform", [*_REVERSE, _jvp, _jvp_of_vmap])
def test_transforms_in_a_compiled_forward(transform, reads_parameters):
    model, reference = shard(_Differentiates(transform, reads_parameters))
    if reads_parameters and RELEASE < (2, 13):
        with pytest.raises(Exception, match="this release of torch then computes some derivatives"):
            compiled(model, "interpreted")(batch_of(2, 8))
        return
    without_hooks = contextlib.nullcontext()
    if transform in _REVERSE and reads_parameters:  # left to eager code
        without_hooks = torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS)
    with without_hooks:
        _check(compiled(model, "interpreted"), model, reference, batch_of(2, 8))


class _EnablesGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.outer(self.inner(x).sin()).square().sum()
            return torch.autograd.grad(energy, x)[0]


@needs_a_job
def test_a_forward_without_grad_may_enable_it():
    model, reference = shard(_EnablesGrad())
    x = batch_of(2, 8)
    with torch.no_grad():
        assert_close(model(x), reference(x))
