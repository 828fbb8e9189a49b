"""``capture_graphs``: the rewritten graphs, as the backend hands them to the compiler."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from deepcompile_zero3.graph.peak import gathered_peak
from deepcompile_zero3.graph.text import graph_text
from deepcompile_zero3.torch_internals import compiler


@dataclass(frozen=True)
class CapturedGraph:
    """A rewritten graph.

    Attributes:
        graph_module: a copy, of the user's to keep.
        number: of the forward in this process; a backward has that of its forward.
        region: of a forward: the frame that it was compiled for, as a profile calls it: "0/0".
    """

    graph_module: fx.GraphModule
    number: int
    region: str = ""

    @property
    def text(self) -> str:
        """The graph a line a node, with dtypes, shapes and FQNs; the same on every machine."""
        return graph_text(self.graph_module)

    @property
    def gathered_peak(self) -> int:
        """Bytes of full parameters that are alive at once at most, by the plan: from the start of
        each gather to the last use, nodes in their order. Compare with :func:`buffer_stats`.
        """
        return gathered_peak(self.graph_module.graph)


@dataclass(eq=False)
class CapturedGraphs:
    """The graphs of a ``capture_graphs`` block, in the order of their compilation."""

    forward: list[CapturedGraph] = field(default_factory=list)
    backward: list[CapturedGraph] = field(default_factory=list)


# Not a context variable: a backward may be compiled on a thread of the autograd engine.
_active: list[CapturedGraphs] = []


@contextlib.contextmanager
def capture_graphs() -> Iterator[CapturedGraphs]:
    """Collects the graphs that ``backend="zero3"`` rewrites while the block runs.

    Only what is compiled inside of the block is seen: a model that was compiled before has no
    reason to compile again.

    Example::

        with capture_graphs() as graphs:
            torch.compile(model, backend="zero3")(x).sum().backward()
        print(graphs.backward[0].text)
    """
    graphs = CapturedGraphs()
    _active.append(graphs)
    try:
        yield graphs
    finally:
        _active.remove(graphs)


def captured(gm: fx.GraphModule, is_backward: bool, number: int) -> None:
    """Tells the blocks that are open of a rewritten graph."""
    for graphs in _active:
        region = "" if is_backward else compiler.compile_id()
        graph = CapturedGraph(fx.GraphModule(gm, copy.deepcopy(gm.graph)), number, region)
        (graphs.backward if is_backward else graphs.forward).append(graph)
