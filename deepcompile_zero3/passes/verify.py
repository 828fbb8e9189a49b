"""Verifies a graph after each pass.

A pass that breaks an invariant makes compilation fail, with an error that names the pass, the
promise and the node.
"""

from collections.abc import Collection

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.passes.invariants import INVARIANTS
from deepcompile_zero3.passes.rewritten import Rewritten, State, at


class Verifier:
    """Verifies one graph.

    Args:
        graph: the graph, before the first pass.
        direction: "forward" or "backward", for messages.
        with_peak: whether to predict the peak of gathered parameters, which takes longer.
    """

    def __init__(self, graph: Rewritten, direction: str, with_peak: bool) -> None:
        self._graph = graph
        self._direction = direction
        self._with_peak = with_peak
        self._before = State.of(graph, with_peak)

    def check(self, name: str, changes: Collection[str]) -> None:
        """Verifies the graph after the pass ``name``, which gives up the invariants ``changes``.

        Raises:
            Zero3Error: the pass broke another invariant.
        """
        self._graph.has_gathers |= name == "insert_gathers"
        self._graph.has_reductions |= name == "insert_reduces"
        self._graph.is_chained |= name == "chain_reductions"
        for invariant, (promise, violations) in INVARIANTS.items():
            if invariant in changes:
                continue
            where = f"pass '{name}' broke '{invariant}' in the {self._direction} graph"
            try:
                broken = next(violations(self._graph, self._before), None)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise Zero3Error(
                    f"{where}, which cannot be read: {error!r}. The promise is: {promise}"
                ) from error
            if broken is not None:
                text, node = broken
                raise Zero3Error(f"{where}: {text}{at(node)}. The promise is: {promise}")
        self._before = State.of(self._graph, self._with_peak)
