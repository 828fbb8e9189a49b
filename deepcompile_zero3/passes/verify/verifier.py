"""Verifies a graph after each pass.

A pass that breaks an invariant makes compilation fail, with an error that names the pass, the
promise and the node.
"""

from collections.abc import Collection

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.passes.graph_pass import MAY_CHANGE
from deepcompile_zero3.passes.verify.invariants import INVARIANTS
from deepcompile_zero3.passes.verify.rewritten import Rewritten, State, at


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
            Zero3Error: the pass broke another invariant, or left a graph that cannot be read.
        """
        self._graph.ran.append(name)
        self._graph.changes = changes
        try:
            self._check(name, changes)
            self._before = State.of(self._graph, self._with_peak)
        except Zero3Error:
            raise
        except Exception as error:
            raise Zero3Error(
                f"pass '{name}' left a {self._direction} graph that cannot be read: {error!r}"
            ) from error

    def _check(self, name: str, changes: Collection[str]) -> None:
        for invariant, (promise, violations) in INVARIANTS.items():
            if invariant in changes:
                continue
            broken = next(violations(self._graph, self._before), None)
            if broken is not None:
                text, node = broken
                hint = (
                    f". If this is meant: changes=({invariant!r},)"
                    if invariant in MAY_CHANGE
                    else ""
                )
                raise Zero3Error(
                    f"pass '{name}' broke '{invariant}' in the {self._direction} graph: {text}"
                    f"{at(node)}. The promise is: {promise}{hint}"
                )
