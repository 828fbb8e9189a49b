"""Facts about a parameter that a pass may use."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class ParameterFacts:
    """The facts of one parameter that shape a graph.

    Attributes:
        fqn: its name, for people.
        process_group: number of the process group of its shards. Only neighbors of one group are
            gathered together.
        nbytes: size in bytes of the full tensor in the compute dtype.
        gathers_views: whether the gathered tensor is a view of memory that is only read.
        publishes: whether a backward reads its forward's publication, and moves bytes only if that
            is stale or overwritten.
        sends_any_dtype: whether its gradient is sent in its own dtype, if the wire dtype can hold
            it.
        ndim: number of its dimensions.
        uses: positions of its uses in the model's forward as written, before any transformation: a
            transformed graph may depend on the batch.
        only_embeds: whether all uses look up rows.
        is_spared: whether backward does without it (see ``spare``).
        reshard_after_forward: False keeps what forward gathered until backward has used it. None
            leaves the choice open: passes treat it as True, except the one that chooses.
        leaf_dtype: dtype of the leaf's contract; None keeps whatever arrives.
        is_trained: whether it needs a gradient.
        wire_dtype: dtype of its gradient on the wire; None keeps the contract's.
        declares_grad_dtype: whether the contract must be declared to AOTAutograd.
        is_read_as_gathered: whether modules see the all-gather's output unchanged.
        is_gathered: whether it is gathered itself, and not others in its place (see ``source``).
        is_substitute: whether it is gathered in place of another one.
        gather_format: how its shards are quantized before they are gathered (see
            ``codec``); empty: not at all.
    """

    fqn: str
    process_group: int
    nbytes: int
    gathers_views: bool = False
    publishes: bool = False
    sends_any_dtype: bool = False
    ndim: int = 2
    uses: tuple[int, ...] = (0,)
    only_embeds: bool = False
    is_spared: bool = False
    reshard_after_forward: bool | None = True
    leaf_dtype: torch.dtype | None = None
    is_trained: bool = False
    wire_dtype: torch.dtype | None = None
    declares_grad_dtype: bool = False
    is_read_as_gathered: bool = True
    is_gathered: bool = True
    is_substitute: bool = False
    gather_format: str = ""

    @property
    def may_be_kept(self) -> bool:
        """Whether a forward may save the full tensor for backward, by choice or because it has to.

        Gathering again costs nothing where the tensor is published for backward.
        """
        return self.is_gathered and (
            self.reshard_after_forward is False
            or (self.reshard_after_forward is None and not self.publishes)
        )

    def gathered_as(self, format: str) -> "ParameterFacts":
        """Returns these facts for shards that are gathered in ``format``, and so by messages."""
        if not format:
            return self
        return replace(self, gather_format=format, gathers_views=False, publishes=False)


def in_forward_order(facts: ParameterFacts) -> int:
    """Sort key: the order in which a forward needs parameters."""
    return facts.uses[0]


def in_backward_order(facts: ParameterFacts) -> int:
    """Sort key: the order in which a backward needs parameters."""
    return -facts.uses[-1]


def in_gradient_order(facts: ParameterFacts) -> int:
    """Sort key: the order in which a backward has the gradients of parameters."""
    return -facts.uses[0]
