"""Dtypes of gradients at the edge to a parameter: sharded and compiled as in plain eager code.

In eager PyTorch, each gradient that reaches a leaf is cast to ``leaf.grad_dtype`` before gradients
are summed, or keeps its dtype if ``grad_dtype`` is None. AOTAutograd alone loses the dtype.
"""

import pytest
import torch
from support.contract import Fp32WeightGrad
from torch import nn

from deepcompile_zero3 import fully_shard

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.smoke]


LAYERS = {
    "linear": nn.functional.linear,
    "fp32 weight gradient": lambda x, w: Fp32WeightGrad.apply(x, w),
    "upcast in forward": lambda x, w: x.float() @ w.float().t(),
    "used twice": lambda x, w: nn.functional.linear(x, w) + nn.functional.linear(x * 3.3, w),
}


class Layer(nn.Module):
    def __init__(self, function, grad_dtype):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(16, 32, dtype=torch.bfloat16))
        if grad_dtype != "default":
            self.weight.grad_dtype = grad_dtype

    def forward(self, x):
        return self.function(x, self.weight)


def maybe_compiled(model, compiled):
    if not compiled:
        return model
    return torch.compile(model, backend="zero3", options={"inductor": False}, fullgraph=True)


def train(model, run, x):
    """Returns ``.grad`` after each of two backwards that accumulate into it."""
    grads = []
    for scale in (1, 0.7):
        run(x * scale).float().square().mean().backward()
        grad = model.weight.grad
        grads.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone())
    return grads


@pytest.mark.thin
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("function", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("grad_dtype", ["default", torch.float32, None], ids=str)
def test_a_sharded_gradient_is_bit_for_bit_that_of_plain_eager(grad_dtype, function, compiled):
    x = torch.randn(33, 32, dtype=torch.bfloat16)
    model = Layer(function, grad_dtype)
    expected = train(model, model, x)
    model.weight.grad = None

    fully_shard(model)
    run = maybe_compiled(model, compiled)
    actual = train(model, run, x)

    for ours, eagers in zip(actual, expected, strict=True):
        assert ours.dtype == eagers.dtype
        assert torch.equal(ours, eagers)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_asked_of_an_input_alone_leave_the_parameters_alone(compiled):
    model = fully_shard(Layer(nn.functional.linear, "default"))
    run = maybe_compiled(model, compiled)
    x = torch.randn(33, 32, dtype=torch.bfloat16, requires_grad=True)

    (grad,) = torch.autograd.grad(run(x).sum(), x)
    run(x).sum().backward(inputs=[x])

    assert torch.equal(x.grad, grad)
    assert model.weight.grad is None
    run(x).sum().backward()
    assert model.weight.grad is not None
