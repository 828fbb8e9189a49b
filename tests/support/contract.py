"""Layers whose weight gradients arrive in various dtypes, under various contracts.

One model has each layer under each contract. Its loss is a sum over layers, so that each gradient
depends on its layer alone.
"""

import torch
from torch import library, nn

CONTRACTS = {
    "default": "default",
    "float32": torch.float32,
    "None": None,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
WIDTH = 16
ROWS = 32


class Fp32WeightGrad(torch.autograd.Function):
    """A kernel that computes and returns its weight gradient in fp32."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.float().t() @ x.float()


class _CastWeightGrad(Fp32WeightGrad):
    """A kernel that computes its weight gradient in fp32 and casts it to bf16."""

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, (grad.float().t() @ x.float()).bfloat16()


class _LowWeightGrad(torch.autograd.Function):
    """A kernel that computes and returns its weight gradient in bf16, in any parameter's dtype."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return (x.bfloat16() @ w.bfloat16().t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, grad.bfloat16().t() @ x.bfloat16()


@library.custom_op("zero3_tests::weight_grad", mutates_args=())
def _weight_grad(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.float().t() @ x.float()


@_weight_grad.register_fake
def _(grad, x):
    # Wrong on purpose: for bf16 operands the kernel returns another dtype.
    return grad.new_empty(grad.shape[1], x.shape[1])


class _LyingWeightGrad(Fp32WeightGrad):
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, _weight_grad(grad, x)


def _linear(x, w):
    return nn.functional.linear(x, w)


# Functions of activations [ROWS, WIDTH] and a weight [WIDTH, WIDTH], by name of layer. Inductor and
# eager code compute pure matmuls alike.
MATMULS = {
    "linear": _linear,
    "fp32 weight gradient": lambda x, w: Fp32WeightGrad.apply(x, w),
    "cast in a custom backward": lambda x, w: _CastWeightGrad.apply(x, w),
    "upcast in forward": lambda x, w: x.float() @ w.float().t(),
    "bf16 weight gradient": lambda x, w: _LowWeightGrad.apply(x, w),
    "custom op whose fake lies": lambda x, w: _LyingWeightGrad.apply(x, w),
}
OTHERS = {
    "used twice": lambda x, w: torch.cat([_linear(x, w), _linear(x * 3.3, w)]),
    "tied": _linear,
    "embedding": lambda x, w: nn.functional.embedding(torch.arange(len(x)) % WIDTH, w),
    "layer norm": lambda x, w: nn.functional.layer_norm(x, (WIDTH,), w[0]),
}
LAYERS = MATMULS | OTHERS


class Layer(nn.Module):
    def __init__(self, function, weight):
        super().__init__()
        self.function = function
        self.weight = weight

    def forward(self, x):
        return self.function(x, self.weight)


class Kernel(nn.Linear):
    """A linear layer whose weight gradient is in fp32."""

    def forward(self, x):
        return Fp32WeightGrad.apply(x, self.weight)


class Contracts(nn.Module):
    """A model of every layer under every contract."""

    def __init__(self, dtype):
        super().__init__()
        self.layers = nn.ModuleDict()
        for name, function in LAYERS.items():
            for contract, grad_dtype in CONTRACTS.items():
                weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype))
                if grad_dtype != "default":
                    weight.grad_dtype = grad_dtype
                layers = nn.Sequential(Layer(function, weight))
                if name == "tied":
                    layers.append(Layer(function, weight))
                self.layers[f"{name}: {contract}"] = layers

    def forward(self, x):
        return {name: layer(x) for name, layer in self.layers.items()}

    def gradients(self, run, x):
        """Returns the ``.grad`` of each layer, by name, after one backward."""
        sum(out.float().square().mean() for out in run(x).values()).backward()
        return {name: layer[0].weight.grad for name, layer in self.layers.items()}


def batch(dtype):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
