"""Reads a scalar parameter: each rank has an equal row of it, see ``layout``."""

from typing import Any

import torch


class FirstOfEqual(torch.autograd.Function):
    """Returns the first of equal rows, [world, n] -> [*sizes]. Its gradient goes to all rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sizes: torch.Size) -> torch.Tensor:
        """Returns the first row, in the shape ``sizes``."""
        ctx.rows = rows.shape
        return rows[0].view(sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the gradient for each row."""
        return grad.reshape(1, ctx.rows[1]).expand(ctx.rows), None
