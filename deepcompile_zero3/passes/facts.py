"""What a pass may know of a parameter."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from deepcompile_zero3.graph.metadata import PARAMETER
from deepcompile_zero3.runtime import ops


@dataclass(frozen=True)
class ParameterFacts:
    """The facts of one parameter that shape a graph.

    Attributes:
        fqn: its name, for people.
        group: number of its process group; only neighbours of one are gathered together.
        shared: whether ranks share its full tensor, which nobody may write to.
        nbytes: of the full tensor in the compute dtype.
        dim: number of its dimensions.
        uses: positions of its uses in the model's forward, as written: before any graph was
            transformed, which may depend on the batch.
        only_embeds: whether all of them look rows up.
        reshard_after_forward: False keeps what forward gathered until backward has used it, and
            None leaves that open: passes treat it as True, but for the one that chooses.
        grad_dtype: of the leaf's contract; None keeps whatever arrives.
        is_trained: whether it needs a gradient.
        reduce_dtype: of its gradient on the wire; None: as the contract left it.
        declares_grad_dtype: whether the contract must be declared to AOTAutograd.
    """

    fqn: str
    group: int
    nbytes: int
    shared: bool = False
    dim: int = 2
    uses: tuple[int, ...] = (0,)
    only_embeds: bool = False
    reshard_after_forward: bool | None = True
    grad_dtype: torch.dtype | None = None
    is_trained: bool = False
    reduce_dtype: torch.dtype | None = None
    declares_grad_dtype: bool = False

    @property
    def may_be_kept(self) -> bool:
        """Whether a forward may hand the full tensor to backward, by choice or since it has to.
        Where ranks share it, gathering it again costs nothing.
        """
        return self.reshard_after_forward is False or (
            self.reshard_after_forward is None and not self.shared
        )


def fqns_of(collective: fx.Node) -> list[str]:
    """The names of the parameters that a gather's start or a reduction in a graph is of."""
    starts = collective.target is ops.all_gather_start.default
    placeholders: Any = collective.args[0] if starts else [collective.args[1]]
    return [placeholder.meta[PARAMETER].fqn for placeholder in placeholders]


def in_forward_order(facts: ParameterFacts) -> int:
    """A sort key: the order in which a forward needs parameters."""
    return facts.uses[0]


def in_backward_order(facts: ParameterFacts) -> int:
    """A sort key: the order in which a backward needs parameters."""
    return -facts.uses[-1]


def in_gradient_order(facts: ParameterFacts) -> int:
    """A sort key: the order in which a backward has got their gradients."""
    return -facts.uses[0]
