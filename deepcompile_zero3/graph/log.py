"""Logs rewritten graphs to torch's own logs: ``TORCH_LOGS`` and ``TORCH_TRACE``."""

import itertools
import logging
from collections.abc import Iterable, Mapping

from torch import fx

from deepcompile_zero3.graph.metadata import COMMENT
from deepcompile_zero3.graph.size import nbytes_of_tensor
from deepcompile_zero3.graph.text import graph_text
from deepcompile_zero3.runtime import REDUCTIONS, WAITS
from deepcompile_zero3.torch_internals import compiler

_log = logging.getLogger(__name__)

forward_numbers = itertools.count()  # of this process; a backward has the number of its forward


def logs_are_requested() -> bool:
    """Returns whether the logs of this library were requested, by ``TORCH_LOGS`` for example.

    The level of the root logger does not count: it is for the whole process.
    """
    levels = (logging.getLogger(__name__.rsplit(".", n)[0]).level for n in range(3))
    return next(filter(None, levels), logging.WARNING) <= logging.INFO or compiler.is_traced()


def log_graph(gm: fx.GraphModule, direction: str, number: int, kept: Mapping[str, int]) -> None:
    """Logs a rewritten graph: a line at INFO, its text at DEBUG, an artifact for ``TORCH_TRACE``.

    Args:
        gm: the graph. No reference to it is kept.
        direction: "forward" or "backward".
        number: number of the forward in this process.
        kept: sizes in bytes of the parameters that this forward keeps for its backward, keyed by
            FQN.
    """
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s %d: %s", direction, number, _summary(gm.graph, kept))
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s %d:\n%s", direction, number, graph_text(gm))
    compiler.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"zero3_{direction}_{number}", "encoding": "string"},
        payload_fn=lambda: graph_text(gm),
    )


def _summary(graph: fx.Graph, kept: Mapping[str, int]) -> str:
    waits = [node for node in graph.nodes if node.target in WAITS]
    gathered = [value for node in waits for value in node.meta["val"][:-1]]  # the last is a token
    dtypes = [node.meta[COMMENT] for node in graph.nodes if node.target in REDUCTIONS]
    return ", ".join(
        (
            f"gathers: {len(waits)} {_mib(map(nbytes_of_tensor, gathered))}",
            f"kept: {len(kept)} {_mib(kept.values())}",
            f"reductions: {len(dtypes)} {_mib(d.numel * d.wire.itemsize for d in dtypes)}",
        )
    )


def _mib(sizes: Iterable[int]) -> str:
    return f"({sum(sizes) / 2**20:,.3f} MiB)"
