"""Facts about a parameter that a pass may use."""

from dataclasses import dataclass, replace

from deepcompile_zero3.facts import LeafFacts, SourceFacts


@dataclass(frozen=True, kw_only=True)
class ParameterFacts(SourceFacts, LeafFacts):
    """The facts that shape a graph of one of its inputs: of the source, its parameter and its uses.

    Attributes:
        fqn: its name, for people.
        uses: positions of its uses in the model's forward as written, before any transformation: a
            transformed graph may depend on the batch.
        only_embeds: whether all uses look up rows.
        is_spared: whether backward does without it (see ``spare``).
        gather_format: how its shards are quantized before they are gathered (see
            ``codec``); empty: not at all.
    """

    fqn: str
    uses: tuple[int, ...] = (0,)
    only_embeds: bool = False
    is_spared: bool = False
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
