"""Chooses which parameters a forward keeps gathered for its backward."""

from collections.abc import Mapping

from torch import fx

from deepcompile_zero3.passes.facts import ParameterFacts


def choose_kept(parameters: Mapping[fx.Node, ParameterFacts], max_bytes: float) -> set[fx.Node]:
    """Returns the ``parameters`` that a forward keeps.

    ``parameters`` are keyed by graph input, in the order in which backward needs them. Only inputs
    that the graph saves for backward are kept. Where ``reshard_after_forward`` is None, the first
    ones that fit into ``max_bytes`` are kept: each kept byte saves a gathered byte, whichever
    parameter it belongs to, and backward frees its first parameters first.
    """
    kept = set()
    for node, facts in parameters.items():
        if not facts.may_be_kept or not any(user.op == "output" for user in node.users):
            continue
        if facts.reshard_after_forward is None:
            if facts.nbytes > max_bytes:
                continue
            max_bytes -= facts.nbytes
        kept.add(node)
    return kept
