"""Backwards that compiled autograd would run are refused, before they lose a gradient."""

import pytest
import torch
from support.models import (
    Stack,
    batch_of,
    compiled,
    each_way,
    mean_square,
    mine,
    shard,
)
from torch._dynamo.compiled_autograd import _enable

from deepcompile_zero3 import Zero3Error

REFUSED = (
    r"a backward of '.*(norm|head)\.weight' runs outside.*compiled autograd.*callback at the end"
)


def _refused(how):
    model = Stack()
    model, reference = shard(model, model.blocks)
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
def test_compiled_autograd_is_refused(run_apart, how):
    run_apart(_refused, how)


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


def _refused_inside_of_another(how):
    model = Stack()
    model, _ = shard(model, model.blocks)
    x = torch.ones((), requires_grad=True)
    loss = mean_square(compiled(model, how), mine(batch_of(4, 8)))
    with pytest.raises(Zero3Error, match=REFUSED):
        _BackwardInBackward.apply(x, [loss]).backward()


@each_way
def test_compiled_autograd_inside_of_another_backward_is_refused(run_apart, how):
    run_apart(_refused_inside_of_another, how)


def _refused_in_a_callback():
    """Reads what a forward has saved in a callback at the end of another backward."""
    model, _ = shard(Stack())
    saved = model(mine(batch_of(4, 8)).requires_grad_()).grad_fn
    x = torch.ones((), requires_grad=True)
    queue = torch.autograd.Variable._execution_engine.queue_callback
    x.register_hook(lambda _: queue(lambda: saved._saved_mat2))
    with pytest.raises(Zero3Error, match=REFUSED):
        (2 * x).backward()


def test_a_callback_at_the_end_of_a_backward_is_told_from_compiled_autograd(run_apart):
    run_apart(_refused_in_a_callback)
