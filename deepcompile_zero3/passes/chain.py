"""Fixes one order of the reductions in a backward, which no scheduler may change."""

from torch import fx

from deepcompile_zero3.graph.metadata import COMMENT
from deepcompile_zero3.runtime import REDUCTIONS


def chain_reductions(gm: fx.GraphModule) -> None:
    """Passes each reduction the token of the one before it.

    A compiler's scheduler moves nodes by what it knows of memory and time, which differs from rank
    to rank. Two collectives that swap on one rank cause a hang or silent corruption. Every
    scheduler keeps a data dependency. Gathers, which ``insert_gathers`` chains, and reductions have
    separate process groups, so that no order between the two is needed.
    """
    last = None
    for node in gm.graph.nodes:
        if node.target not in REDUCTIONS:
            continue
        if last is not None:
            node.args = (*node.args[:2], last, *node.args[3:])
            # Tracing may have recorded values of the former arguments. Inductor would trust them.
            kept = ("val", COMMENT)
            node.meta = {key: node.meta[key] for key in kept if key in node.meta}
        last = node
    gm.graph.lint()
    gm.recompile()
