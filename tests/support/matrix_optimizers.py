"""Optimizers whose states have other shapes than parameters, written for plain tensors."""

import torch


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. 2018: a preconditioner for each dimension, made by ``torch.eye``."""

    def __init__(self, params, lr=0.1, eps=1e-2):
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, update = self.state[parameter], parameter.grad
                if not state:
                    state["step"] = 0
                    for dim, size in enumerate(parameter.shape):
                        state[f"factor_{dim}"] = group["eps"] * torch.eye(size)
                state["step"] += 1
                for dim in range(parameter.dim()):
                    rows = parameter.grad.movedim(dim, 0).flatten(1)
                    factor = state[f"factor_{dim}"]
                    factor.add_(rows @ rows.T)
                    root = _power(factor, -1 / (2 * parameter.dim()))
                    update = torch.tensordot(root, update, dims=([1], [dim])).movedim(0, dim)
                parameter.sub_(update, alpha=group["lr"])


class Soap(torch.optim.Optimizer):
    """Vyas et al. 2024: Adam in the eigenbasis of Shampoo's preconditioners, kept in lists.

    Its first step only makes states, and it makes some of them in the second.
    """

    def __init__(self, params, lr=0.01, betas=(0.9, 0.95), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, self.state[parameter], group)

    def _step(self, parameter, grad, state, group):
        first, second = group["betas"]
        if not state:
            state["step"] = 0
            state["factors"] = [torch.zeros(size, size) for size in parameter.shape]
        state["factors"][0].lerp_(grad @ grad.T, 1 - second)
        state["factors"][1].lerp_(grad.T @ grad, 1 - second)
        state["step"] += 1
        if state["step"] == 1:
            state["bases"] = None
            return
        if state["bases"] is None:
            state["bases"] = tuple(torch.linalg.eigh(factor)[1] for factor in state["factors"])
            state["exp_avg"] = torch.zeros(parameter.shape)
            state["exp_avg_sq"] = torch.zeros(parameter.shape)
        left, right = state["bases"]
        rotated = left.T @ grad @ right
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].lerp_(rotated.square(), 1 - second)
        update = (left.T @ state["exp_avg"] @ right) / (state["exp_avg_sq"].sqrt() + group["eps"])
        parameter.sub_(left @ update @ right.T, alpha=group["lr"])
        bases = zip(state["factors"], state["bases"], strict=True)
        state["bases"] = tuple(torch.linalg.qr(factor @ basis)[0] for factor, basis in bases)


class Blockwise(torch.optim.Optimizer):
    """Momentum in int8, with a scale for each block of elements, one for all, and a table."""

    def __init__(self, params, lr=0.1, block=12, table=256):
        super().__init__(params, {"lr": lr})
        self._block, self._table = block, table

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                size = parameter.numel()
                blocks = -(-size // self._block)
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["momentum"] = torch.zeros_like(parameter)
                    state["scales"] = torch.zeros(blocks)
                    state["largest"] = torch.tensor(0.0)
                    state["table"] = torch.linspace(-1, 1, self._table)
                state["step"] += 1
                padded = torch.zeros(blocks * self._block)
                padded[:size] = parameter.grad.flatten()
                padded = padded.view(blocks, self._block)
                momentum = torch.zeros(blocks * self._block)
                momentum[:size] = state["momentum"].flatten()
                momentum = momentum.view(blocks, -1) * state["scales"][:, None]
                momentum = 0.9 * momentum + padded
                scales = momentum.abs().amax(1).clamp_min(1e-12) / 127
                state["scales"].copy_(scales)
                state["largest"] = scales.max()
                rounded = (momentum / scales[:, None]).round().flatten()[:size]
                state["momentum"].copy_(rounded.view(parameter.shape))
                parameter.sub_(momentum.flatten()[:size].view(parameter.shape), alpha=group["lr"])


def _power(matrix, exponent):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp_min(1e-12) ** exponent) @ vectors.T
