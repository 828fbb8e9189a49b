"""Compiles the graphs of a step for ranks that do not exist, so that theirs are found stored."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from deepcompile_zero3 import source_key
from deepcompile_zero3.backend import CompiledGraph, compile_with_inductor
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph_inputs import parse_options
from deepcompile_zero3.passes.graph_pass import without_key
from deepcompile_zero3.tools.document import Document
from deepcompile_zero3.tools.planning.graphs import (
    ShardModel,
    check_compiled,
    fake_model,
    zeros_like,
)
from deepcompile_zero3.tools.progress import Tell, say_nothing
from deepcompile_zero3.tools.table import Table
from deepcompile_zero3.torch_internals import dynamo_runs, stored_graphs


@dataclass(frozen=True)
class GraphAhead:
    """One of Dynamo's graphs, compiled with its backward."""

    seconds: float  #: of its compilation
    parameters: int  #: number of its sharded parameters
    regions: Mapping[str, int]  #: number of blocks that share each region's compilation
    is_stored: bool  #: whether later processes find it


@dataclass
class CompiledAhead(Document):
    """The graphs that :func:`compile_ahead` compiled. Printing it gives a table.

    Attributes:
        folder: where the graphs are stored.
        graphs: the graphs, in the order of compilation.
    """

    folder: str
    graphs: list[GraphAhead] = field(default_factory=list)

    def _title(self) -> str:
        return f"stored for ranks on CPUs, in {self.folder}"

    def _parts(self) -> Iterator[str | Table]:
        rows = []
        for number, graph in enumerate(self.graphs):
            blocks = ", ".join(f"{calls} x {name}" for name, calls in graph.regions.items())
            rows.append((number, f"{graph.seconds:.1f}", graph.parameters, blocks))
        yield Table("", ("graph", "seconds", "parameters", "blocks"), rows)
        yield ""
        yield self._title()
        if missing := [str(n) for n, graph in enumerate(self.graphs) if not graph.is_stored]:
            yield (
                f"NOT stored, and so compiled again by ranks: {', '.join(missing)}. Nothing is "
                "stored while logs or a trace of this library are requested. What torch's cache "
                "refuses is in its logs: TORCH_LOGS=torch._functorch._aot_autograd.autograd_cache"
            )


def compile_ahead(
    build: Callable[[], nn.Module],
    call: Mapping[str, Any],
    *,
    world_size: int,
    replicas: int = 1,
    shard: ShardModel | None = None,
    options: Mapping[str, Any] | None = None,
    tell: Tell = say_nothing,
) -> CompiledAhead:
    """Compiles and stores the graphs of ``model(**call)`` and its backward.

    The model has no data: its shards are memory that is never touched. It is on the CPU, and so
    are the graphs. Ranks that call ``torch.compile(model, backend="zero3",
    options=options)(**call)`` on the CPU of the same kind of machine, with the same release of
    torch and the same folder of compiled code, and that exchange messages (``transport="c10d"``),
    load what was stored. Warns if this machine has a GPU. Resets Dynamo at its end, so that other
    compiled code of this process is compiled or loaded again.

    Args:
        build, call, world_size, replicas, shard, options: see :func:`plan`.
        tell: called with the name of each stage as it begins.

    Raises:
        TypeError: ``build`` does not return a module, or ``call`` is not a mapping.
        ValueError: an option is unknown, asks for no compiler, or a number of ranks is wrong.
        Zero3Error: the process has a process group, no graph was compiled, or a setting of torch,
            or a change of this package's files, prevents that graphs are stored.
    """
    parsed = parse_options(options)
    if not parsed.inductor:
        raise ValueError("option 'inductor': False compiles nothing, and nothing can be stored")
    if reason := stored_graphs.why_not_stored(parsed.inductor_config):
        raise Zero3Error(f"nothing that is compiled would be stored: {reason}")
    if names := without_key(parsed.passes):
        raise Zero3Error(
            f"nothing that is compiled would be stored: uuid() of {', '.join(names)} returns None"
        )
    if not source_key.is_unchanged():
        raise Zero3Error("nothing that is compiled would be stored: start again, see the warning")
    if torch.cuda.is_available():
        warnings.warn(
            "zero3: the graphs are compiled for CPUs, and ranks on this machine's GPUs would not "
            "find them: let those compile in their first step",
            stacklevel=2,
        )
    found = CompiledAhead(str(stored_graphs.cache_folder()))

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable:
        outputs = [
            node.meta["example_value"] if isinstance(node, fx.Node) else node
            for node in gm.graph.output_node().args[0]  # type: ignore[union-attr]
        ]
        tell(f"compiling graph {len(found.graphs)} and its backward")
        before, start = dynamo_runs.count_of_stored_graphs(), time.perf_counter()
        compiled = CompiledGraph(gm, example_inputs, parsed, compile_with_inductor)
        found.graphs.append(
            GraphAhead(
                seconds=time.perf_counter() - start,
                parameters=compiled.num_parameters,
                regions=compiled.calls,
                is_stored=dynamo_runs.count_of_stored_graphs() > before,
            )
        )
        return lambda *_: [zeros_like(output) for output in outputs]

    tell("building and sharding the model")
    with fake_model(build, call, world_size, replicas, shard) as model:
        model.to_empty(device="cpu")
        try:
            tell("tracing the model")
            torch.compile(model, backend=backend)(**call)
        finally:
            torch.compiler.reset()
    check_compiled(found.graphs)
    return found
