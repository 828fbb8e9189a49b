"""Fixes one order of the collectives in a graph, which no scheduler may change."""

import operator
from typing import Any

from torch import fx

from deepcompile_zero3.graph.metadata import COMMENT
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops


def reductions_in(graph: fx.Graph) -> list[fx.Node]:
    """Returns all reductions of a graph, in order."""
    return [node for node in graph.nodes if node.target in REDUCTIONS]


def chain_reductions(gm: fx.GraphModule) -> None:
    """Passes each reduction the token of the one before it.

    A scheduler moves nodes by estimates of memory and time, which differ from rank to rank. Two
    collectives that swap on one rank cause a hang or silent corruption. Every scheduler keeps a
    data dependency. Gathers are chained by ``insert_gathers``. They have a process group of their
    own, and need no order with reductions.
    """
    last = None
    for node in reductions_in(gm.graph):
        if last is not None:
            node.args = (*node.args[:2], last, *node.args[3:])
            # Tracing may have recorded values of the former arguments. Inductor would trust them.
            kept = ("val", COMMENT)
            node.meta = {key: node.meta[key] for key in kept if key in node.meta}
        last = node


def chain_gathers(graph: fx.Graph) -> None:
    """Makes each gather depend on the one before it, for passes that move or merge gathers.

    Each start and each wait takes the handle of the start, or the token of the wait, ahead of it.
    So no scheduler changes their order.
    """
    after: Any = None
    tokens = []
    for node in list(graph.nodes):
        if node.target is ops.all_gather_start.default:
            if after is not None:
                node.args = (node.args[0], after, *node.args[2:])
            after = node
        elif node.target in WAITS:
            ahead = () if after is node.args[0] else (after,)
            node.args = (*node.args[:2], *ahead)
            placeholders: Any = node.args[1]
            with graph.inserting_after(node):
                after = graph.call_function(operator.getitem, (node, len(placeholders)))
            after.meta["val"] = node.meta["val"][-1]
            tokens += [each for each in node.users if each.args[1] == len(placeholders)]
    for token in tokens:
        if not token.users:
            graph.erase_node(token)
