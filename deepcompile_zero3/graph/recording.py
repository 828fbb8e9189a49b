"""Records graphs as they are before the passes, and their runs, to rewrite them again."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from deepcompile_zero3.graph.calls import copied
from deepcompile_zero3.runtime import _C

_COMPILED = "CompiledFunctionBackward"  # name of the autograd node of a compiled graph


class RecordedGraph(NamedTuple):
    """A graph that was rewritten.

    Attributes:
        pipeline: the passes.
        before: a copy of the graph before them.
        after: a copy of the rewritten graph.
    """

    pipeline: Any
    before: fx.GraphModule
    after: fx.GraphModule


class Run(NamedTuple):
    """A run of a graph.

    Attributes:
        number: number of the forward; a backward has its forward's.
        is_backward: whether the backward ran.
        seconds: seconds that it took on the host.
        waited: seconds of these that it waited for other ranks.
    """

    number: int
    is_backward: bool
    seconds: float
    waited: float


@dataclass(eq=False)
class Recording:
    """Graphs of a process, and the runs that read some parameters.

    Attributes:
        parameters: the parameters.
        graphs: graphs by number, and by whether they are backwards.
        read: the parameters that the latest run of each forward read, in its graph's order.
        runs: the runs, in their order.
    """

    parameters: frozenset[object]
    graphs: dict[tuple[int, bool], RecordedGraph] = field(default_factory=dict)
    read: dict[int, Sequence[Any]] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)


# Not a context variable: a backward may be compiled on a thread of the autograd engine.
_active: list[Recording] = []


@contextlib.contextmanager
def record_graphs(parameters: Collection[object]) -> Iterator[Recording]:
    """Records the graphs that are compiled in the block, and runs that read ``parameters``."""
    recording = Recording(frozenset(parameters))
    _active.append(recording)
    try:
        yield recording
    finally:
        _active.remove(recording)


def is_recording_graphs() -> bool:
    """Returns whether a ``record_graphs`` block is open."""
    return bool(_active)


def is_recording_graphs_of(parameters: Iterable[object]) -> bool:
    """Returns whether a ``record_graphs`` block is open for one of ``parameters``."""
    return any(not recording.parameters.isdisjoint(parameters) for recording in _active)


def original_of(gm: fx.GraphModule) -> fx.GraphModule | None:
    """Returns a copy of a graph that will be rewritten, if a block is open."""
    return copied(gm) if is_recording_graphs() else None


def add_graph(
    number: int, is_backward: bool, pipeline: Any, source: fx.GraphModule | None, gm: fx.GraphModule
) -> None:
    """Adds a graph, rewritten from ``source``, to all open blocks."""
    if source is not None:
        graph = RecordedGraph(pipeline, source, copied(gm))
        for recording in _active:
            recording.graphs[number, is_backward] = graph


def run_recorded(
    run: Callable, args: tuple, number: int, parameters: Sequence[object]
) -> list[Any]:
    """Returns ``run(*args)``, a forward, and notes the times of it and of its backward."""
    begun = _Begun(number, False, parameters)
    outputs = run(*args)
    begun.end()
    nodes = {value.grad_fn for value in outputs if isinstance(value, torch.Tensor)}
    for node in nodes:
        if node is not None and node.name() == _COMPILED:
            _note_backward(node, number, parameters)
    return outputs


class _Begun:
    def __init__(self, number: int, is_backward: bool, parameters: Sequence[object]) -> None:
        self._graph = number, is_backward
        self._parameters = parameters
        self._start = time.perf_counter()
        self._waited = _C.seconds_waited()

    def end(self) -> None:
        """Adds the run to the blocks that are open for its parameters."""
        seconds = time.perf_counter() - self._start
        run = Run(*self._graph, seconds, _C.seconds_waited() - self._waited)
        for recording in _active:
            if not recording.parameters.isdisjoint(self._parameters):
                recording.runs.append(run)
                recording.read[run.number] = self._parameters


def _note_backward(node: Any, number: int, parameters: Sequence[object]) -> None:
    begun: list[_Begun] = []

    def begin(_: Any) -> None:
        begun[:] = [_Begun(number, True, parameters)]

    def end(*_: Any) -> None:
        if begun:
            begun.pop().end()

    node.register_prehook(begin)
    node.register_hook(end)
