"""What a pass may know of a parameter."""

from dataclasses import dataclass

import torch

_SMALL = 2**20  # bytes


@dataclass(frozen=True)
class ParameterFacts:
    """The facts of one parameter that shape a graph.

    Attributes:
        fqn: the name it goes by in graphs.
        group: number of its parameter group; neighbours of one group are gathered together.
        nbytes: of the full tensor in the compute dtype.
        dim: number of its dimensions.
        order: of the parameter in the model's forward, before any graph was optimised.
        reshard_after_forward: False keeps what forward gathered until backward has used it.
        grad_dtype: of the leaf's contract; None keeps whatever arrives.
        reduce_dtype: of its gradient on the wire; None: as the contract left it.
        declares_grad_dtype: whether the contract must be declared to AOTAutograd.
    """

    fqn: str
    group: int
    nbytes: int
    dim: int = 2
    order: int = 0
    reshard_after_forward: bool = True
    grad_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    declares_grad_dtype: bool = False

    @property
    def is_small(self) -> bool:
        """Whether its bytes do not matter: a bias, or the scale of a norm."""
        return self.dim == 1 and self.nbytes <= _SMALL
