"""Chooses which parameters a forward keeps gathered for its backward."""

from collections.abc import Mapping

from torch import fx

from deepcompile_zero3.graph.metadata import KEEP
from deepcompile_zero3.passes.facts import ParameterFacts, in_backward_order
from deepcompile_zero3.passes.graph_pass import GraphFacts
from deepcompile_zero3.passes.markers import is_saved_for_backward


def mark_kept(gm: fx.GraphModule, facts: GraphFacts) -> None:
    """Marks the inputs of a forward that it keeps gathered, within the limit of the options."""
    in_order = dict(sorted(facts.gathered.items(), key=lambda item: in_backward_order(item[1])))
    for node in choose_kept(in_order, facts.keep_bytes):
        node.meta[KEEP] = True


def may_keep(node: fx.Node, facts: ParameterFacts) -> bool:
    """Returns whether a forward may keep the input ``node``, which it gathers, for its backward."""
    is_saved = is_saved_for_backward(node) or not facts.is_trained
    return is_saved and facts.may_be_kept and any(user.op == "output" for user in node.users)


def choose_kept(parameters: Mapping[fx.Node, ParameterFacts], max_bytes: float) -> set[fx.Node]:
    """Returns the ``parameters`` that a forward keeps.

    ``parameters`` are keyed by graph input, in the order in which backward needs them. Only inputs
    that the graph saves for backward are kept. Where ``reshard_after_forward`` is None, the first
    ones that fit into ``max_bytes`` are kept: each kept byte saves a gathered byte, whichever
    parameter it belongs to, and backward frees its first parameters first.
    """
    kept = set()
    for node, facts in parameters.items():
        if not may_keep(node, facts):
            continue
        if facts.reshard_after_forward is None:
            if facts.nbytes > max_bytes:
                continue
            max_bytes -= facts.nbytes
        kept.add(node)
    return kept
