"""Backwards that compiled autograd would run are refused, before they lose a gradient."""

import pytest
import torch
from support.models import (
    Stack,
    batch_of,
    compiled,
    each_way,
    either_transport,
    mean_square,
    mine,
    shard,
)
from torch._dynamo.compiled_autograd import _enable

from deepcompile_zero3 import Zero3Error

REFUSED = (
    r"compiled autograd runs the backward of '.*(norm|head)\.weight'.*compiled_autograd = False"
)


def _refused(how, transport):
    model = Stack()
    model, reference = shard(model, model.blocks, transport=transport)
    run = compiled(model, how)
    x = mine(batch_of(4, 8))
    with _enable(lambda graph: graph), pytest.raises(Zero3Error, match=REFUSED):
        mean_square(run, x).backward()
    loss = mean_square(run, x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        with pytest.raises(Zero3Error, match=REFUSED):
            torch.compile(lambda: loss.backward(), backend="eager")()
        mean_square(run, x).backward()  # compiled autograd runs no others
    mean_square(reference, batch_of(4, 8)).backward()
    for mine_, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine_.grad.full_tensor(), whole.grad)


@each_way
@either_transport
def test_compiled_autograd_is_refused(run_apart, how, transport):
    run_apart(_refused, how, transport)


class _BackwardInBackward(torch.autograd.Function):
    """A backward in which compiled autograd runs another."""

    @staticmethod
    def forward(ctx, x, losses):
        [ctx.loss] = losses
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad(), _enable(lambda graph: graph):
            ctx.loss.backward()
        return grad, None


def _lost():
    model = Stack()
    model, _ = shard(model, model.blocks)
    x = torch.ones((), requires_grad=True)
    loss = mean_square(model, mine(batch_of(4, 8)))
    with pytest.warns(UserWarning, match=r"dropped a backward.*gradients of '.*' .* 14 in all"):
        _BackwardInBackward.apply(x, [loss]).backward()


def test_gradients_that_the_engine_drops_are_missed_aloud(run_apart):
    run_apart(_lost)
