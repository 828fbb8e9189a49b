"""The memory of a rank over a simulated step, by kind."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from deepcompile_zero3.graph.alias import base_of
from deepcompile_zero3.graph.metadata import KEPT_OF, fqns_of
from deepcompile_zero3.graph.peak import gathered_items
from deepcompile_zero3.graph.size import nbytes_of
from deepcompile_zero3.passes.graph_parameters import saved_outputs
from deepcompile_zero3.runtime import _C, WAITS, ops
from deepcompile_zero3.tools.planning.kernels import is_collective, is_inlined
from deepcompile_zero3.tools.timeline import Sample

KINDS = ("shards", "optimizer", "gradients", "gathered", "activations", "communication")


@dataclass
class _Saved:
    """Memory that a forward leaves for its backward, under one name or several."""

    kind: str
    nbytes: int
    names: int = 0


class Memory:
    """Bytes that are alive, and their changes. ``clock`` returns seconds since the step began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.alive: Counter[str] = Counter()  # bytes by kind
        self.samples: list[Sample] = []  # a sample for each change, of the bytes of KINDS after it
        self._saved: dict[tuple[int, str], _Saved] = {}  # by graph number and name
        self._results: list[_Saved] = []  # outputs that only the caller reads
        self._gathered: dict[fx.Node, int] = {}  # bytes, with padding
        self.moved_out = 0  # bytes that left memory for a file, or a GPU for host memory
        self.moved_in = 0  # bytes that came back
        self._others, _ = _C.meta_buffers(reset_peak=True)
        self._buffers = 0  # bytes of the runtime's, undelivered gradients included

    def change(self, kind: str, nbytes: int) -> None:
        """Adds ``nbytes`` of a kind, or frees them if they are negative."""
        if nbytes:
            self.alive[kind] += nbytes
            self._note()

    def compute(self, node: fx.Node) -> None:
        """Adds the memory that ``node`` of a graph computes, if any."""
        if node.target is ops.store_start.default:
            self.moved_out += nbytes_of(node.args[0])  # type: ignore[arg-type]
        elif node.target is ops.load_start.default:  # takes the memory that load_wait returns
            self.change("activations", nbytes := nbytes_of(node.args[0]))  # type: ignore[arg-type]
            self.moved_in += nbytes
        elif node.target is not ops.load_wait.default and _kind(node) == "activations":
            self.change("activations", nbytes_of(node))

    def gather(self, node: fx.Node, nbytes: int) -> None:
        """Adds the gathered parameter ``node`` of a graph, padding included."""
        self._gathered[node] = nbytes
        self.change("gathered", nbytes)

    def free(self, node: fx.Node, number: int) -> None:
        """Frees the memory of ``node`` or, for a graph's input, the saved tensor behind it."""
        if node.op != "placeholder":
            if kind := _kind(node):
                self.change(kind, -self._nbytes(node))
        elif memory := self._saved.pop((number, _saved_as(node)), None):
            memory.names -= 1
            if not memory.names:
                self.change(memory.kind, -memory.nbytes)

    def end_graph(self, graph: fx.Graph, number: int) -> None:
        """Keeps the results of a graph, and frees memory that was saved for it and never read."""
        for node in graph.find_nodes(op="placeholder"):
            self.free(node, number)
        saved = saved_outputs(graph)
        by_base: dict[fx.Node, _Saved] = {}
        for node in graph.output_node().all_input_nodes:
            base = base_of(node)
            if kind := _kind(base):
                memory = by_base.setdefault(base, _Saved(kind, self._nbytes(base)))
                if node in saved:
                    memory.names += 1
                    self._saved[number, _saved_as(node)] = memory
        self._results += [memory for memory in by_base.values() if not memory.names]

    def forget_results(self) -> None:
        """Frees the results that graphs returned to the caller."""
        for memory in self._results:
            self.change(memory.kind, -memory.nbytes)
        self._results = []

    def follow_buffers(self) -> None:
        """Records the bytes of the runtime's buffers, first at their peak, then now."""
        in_use, peak = _C.meta_buffers(reset_peak=True)
        for nbytes in (peak - self._others, in_use - self._others):
            if nbytes != self._buffers:
                self._buffers = nbytes
                self._note()

    def _nbytes(self, node: fx.Node) -> int:
        return self._gathered.get(node, nbytes_of(node))

    def _note(self) -> None:
        self.alive["communication"] = max(self._buffers - self.alive["gradients"], 0)
        self.samples.append((self._clock(), tuple(self.alive[kind] for kind in KINDS)))


def _saved_as(node: fx.Node) -> str:
    """Returns the name that an output of a forward shares with the input of its backward."""
    if _kind(node) != "gathered":
        return node.meta.get(KEPT_OF, node.name)
    wait, position = node.args
    return fqns_of(wait.args[0])[position]  # type: ignore[union-attr, arg-type, index]


def _kind(node: fx.Node) -> str:
    """Returns the kind of a node's memory: "" if it owns none, or none to speak of."""
    if node.op != "call_function":
        return ""
    source: Any = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and source.target in WAITS:
        return "gathered" if node in {item for _, item in gathered_items(source)} else ""
    if node.target in (ops.store_wait.default, ops.load_start.default):
        return ""  # it is in a file or in host memory, or a handle
    return "" if is_collective(node) or is_inlined(node) else "activations"
