"""``capture_graphs``: collects the rewritten graphs as the backend passes them to the compiler."""

import contextlib
import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from deepcompile_zero3.graph.calls import copied, inlined
from deepcompile_zero3.graph.metadata import KEEP
from deepcompile_zero3.graph.peak import gathered_peak
from deepcompile_zero3.graph.text import graph_text
from deepcompile_zero3.torch_internals import dynamo_runs


@dataclass(frozen=True)
class CapturedGraph:
    """A rewritten graph.

    Attributes:
        graph_module: a copy of the graph, which the user may keep.
        number: number of the forward in this process. A backward has the number of its forward.
        compile_id: for a forward, the id of the compiled frame as in a profile, such as "0/0"; for
            a backward, "".
    """

    graph_module: fx.GraphModule
    number: int
    compile_id: str = ""

    @property
    def text(self) -> str:
        """Text of the graph with dtypes, shapes and FQNs, one line a node.

        The text is the same on every machine.
        """
        return graph_text(self.graph_module)

    @functools.cached_property
    def inlined(self) -> fx.GraphModule:
        """The graph with the nodes of its regions in place of their calls."""
        return inlined(self.graph_module)

    @property
    def gathered_peak(self) -> int:
        """Predicted peak in bytes of the full parameters that are alive at once.

        Nodes run in their order. A parameter is alive from the start of its gather to its last use.
        Compare with :func:`buffer_stats`.
        """
        return gathered_peak(self.graph_module.graph)


@dataclass(frozen=True)
class CapturedPass:
    """One run of a pass over a graph.

    Attributes:
        name: name of the pass.
        direction: "forward" or "backward".
        before: text of the graph before the pass.
        after: text of the graph after it.
    """

    name: str
    direction: str
    before: str
    after: str

    @property
    def diff(self) -> str:
        """The lines that the pass changed, as a unified diff; empty if it changed nothing."""
        texts = self.before.splitlines(), self.after.splitlines()
        return "\n".join(list(difflib.unified_diff(*texts, lineterm="", n=1))[2:])


@dataclass(eq=False)
class CapturedGraphs:
    """Graphs of a ``capture_graphs`` block, in the order of their compilation.

    Attributes:
        forward: the forward graphs.
        backward: the backward graphs.
        passes: the runs of passes over them, or None if they are not captured.
    """

    forward: list[CapturedGraph] = field(default_factory=list)
    backward: list[CapturedGraph] = field(default_factory=list)
    passes: list[CapturedPass] | None = None


# Not a context variable: a backward may be compiled on a thread of the autograd engine.
_active: list[CapturedGraphs] = []


@contextlib.contextmanager
def capture_graphs(passes: bool = False) -> Iterator[CapturedGraphs]:
    """Collects the graphs that ``backend="zero3"`` rewrites while the block runs.

    Only graphs that are compiled inside the block are collected. A model that was compiled before
    has no reason to compile again.

    Args:
        passes: whether to capture the text of each graph before and after each pass too.

    Yields:
        :class:`CapturedGraphs`, which are filled as graphs are compiled.

    Example::

        with capture_graphs() as graphs:
            torch.compile(model, backend="zero3")(x).sum().backward()
        print(graphs.backward[0].text)
    """
    graphs = CapturedGraphs(passes=[] if passes else None)
    _active.append(graphs)
    try:
        yield graphs
    finally:
        _active.remove(graphs)


def is_capturing() -> bool:
    """Returns whether a ``capture_graphs`` block is open."""
    return bool(_active)


@contextlib.contextmanager
def capture_pass(gm: fx.GraphModule, name: str, direction: str) -> Iterator[None]:
    """Captures the pass that runs in the block, for the ``capture_graphs`` blocks that ask."""
    lists = [graphs.passes for graphs in _active if graphs.passes is not None]
    before = _text_with_marks(gm) if lists else ""
    yield
    if lists:
        captured = CapturedPass(name, direction, before, _text_with_marks(gm))
        for each in lists:
            each.append(captured)


def _text_with_marks(gm: fx.GraphModule) -> str:
    kept = [node.name for node in gm.graph.find_nodes(op="placeholder") if node.meta.get(KEEP)]
    return graph_text(gm) + (f"\nkept for backward: {', '.join(kept)}" if kept else "")


def add_capture(gm: fx.GraphModule, is_backward: bool, number: int) -> None:
    """Adds a rewritten graph to all open ``capture_graphs`` blocks."""
    for graphs in _active:
        compile_id = "" if is_backward else dynamo_runs.compile_id()
        graph = CapturedGraph(copied(gm), number, compile_id)
        (graphs.backward if is_backward else graphs.forward).append(graph)
