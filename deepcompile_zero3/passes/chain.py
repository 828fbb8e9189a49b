"""A backward: one order of its reductions, which no scheduler may change."""

from torch import fx

from deepcompile_zero3.graph.metadata import COMMENT
from deepcompile_zero3.runtime import REDUCTIONS


def chain_reductions(gm: fx.GraphModule) -> None:
    """Hands each reduction the token of the one before it.

    A compiler's scheduler moves nodes by what it knows of memory and time, which differs from
    rank to rank; two collectives that swap on one rank are a hang or silent corruption. A data
    dependency is the one thing that every scheduler keeps. Gathers, chained by ``insert_gathers``,
    and reductions have process groups of their own, so that between them no order has to be kept.
    """
    last = None
    for node in gm.graph.nodes:
        if node.target not in REDUCTIONS:
            continue
        if last is not None:
            node.args = (*node.args[:2], last, *node.args[3:])
            # Tracing may have noted values of the former arguments, which Inductor would trust.
            kept = ("val", COMMENT)
            node.meta = {key: node.meta[key] for key in kept if key in node.meta}
        last = node
    gm.graph.lint()
    gm.recompile()
