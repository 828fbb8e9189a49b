"""Compiles the graphs of a step for ranks that do not exist, so that theirs are found stored."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import fx, nn

from deepcompile_zero3.backend import CompiledGraph, compile_with_inductor
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.calls import calls_by_region
from deepcompile_zero3.options import Options
from deepcompile_zero3.sharding.registered import registered_in
from deepcompile_zero3.tools.planning.graphs import check_compiled, fake_ranks, zeros_like
from deepcompile_zero3.tools.planning.plan import ShardModel, retire, sharded
from deepcompile_zero3.tools.report import text_of
from deepcompile_zero3.torch_internals import compiler


@dataclass(frozen=True)
class GraphAhead:
    """One of Dynamo's graphs, compiled with its backward.

    Attributes:
        seconds: what it took.
        parameters: number of its sharded parameters.
        regions: for each compilation that several blocks share, how many share it.
        is_stored: whether later processes find it.
    """

    seconds: float
    parameters: int
    regions: Mapping[str, int]
    is_stored: bool


@dataclass
class CompiledAhead:
    """What :func:`compile_ahead` compiled. Printing it gives a table.

    Attributes:
        folder: where the graphs are stored.
        graphs: the graphs, in the order of compilation.
    """

    folder: str
    graphs: list[GraphAhead] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        table = Table("graph", "seconds", "parameters", "blocks", box=None, pad_edge=False)
        for number, graph in enumerate(self.graphs):
            blocks = ", ".join(f"{calls} x {name}" for name, calls in graph.regions.items())
            table.add_row(str(number), f"{graph.seconds:.1f}", str(graph.parameters), blocks)
        missing = [number for number, graph in enumerate(self.graphs) if not graph.is_stored]
        parts: list[Any] = [table, "", f"stored in {self.folder}"]
        if missing:
            numbers = ", ".join(map(str, missing))
            parts.append(
                f"NOT stored, and so compiled again by ranks: {numbers}. Nothing is stored while "
                "logs or a trace of this library are requested. What torch's cache refuses is in "
                "its logs: TORCH_LOGS=torch._functorch._aot_autograd.autograd_cache"
            )
        return text_of(parts)


def compile_ahead(
    build: Callable[[], nn.Module],
    call: Mapping[str, Any],
    *,
    world_size: int,
    replicas: int = 1,
    shard: ShardModel | None = None,
    options: Mapping[str, Any] | None = None,
) -> CompiledAhead:
    """Compiles and stores the graphs of ``model(**call)`` and its backward.

    The model has no data: its shards are memory that is never touched. Ranks that call
    ``torch.compile(model, backend="zero3", options=options)(**call)`` on the same kind of machine,
    with the same release of torch and the same folder of compiled code, and that exchange messages
    (``transport="c10d"``), load what was stored. Resets Dynamo at its end, so that other compiled
    code of this process is compiled or loaded again.

    Args:
        build: makes the model; called under ``torch.device("meta")``.
        call: keyword arguments of a forward on one rank; tensors on the CPU, whose values do not
            matter.
        world_size: the number of ranks of all replicas.
        replicas: the number of replicas of the model (hybrid sharding).
        shard: shards the model over a mesh; by default :func:`shard_blocks`.
        options: the options of the backend.

    Raises:
        TypeError: ``build`` does not return a module, or ``call`` is not a mapping.
        ValueError: an option is unknown, asks for no compiler, or a number of ranks is wrong.
        Zero3Error: the process has a process group, no graph was compiled, or a setting of torch
            prevents that graphs are stored.
    """
    parsed = Options.parse(options)
    if not parsed.inductor:
        raise ValueError("option 'inductor': False compiles nothing, and nothing can be stored")
    if reason := compiler.why_not_stored(parsed.inductor_config):
        raise Zero3Error(f"nothing that is compiled would be stored: {reason}")
    found = CompiledAhead(str(compiler.cache_folder()))

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable:
        outputs = [
            node.meta["example_value"] if isinstance(node, fx.Node) else node
            for node in gm.graph.output_node().args[0]  # type: ignore[union-attr]
        ]
        before, start = compiler.count_of_stored_graphs(), time.perf_counter()
        compiled = CompiledGraph(gm, example_inputs, parsed, compile_with_inductor)
        found.graphs.append(
            GraphAhead(
                seconds=time.perf_counter() - start,
                parameters=compiled.number_of_parameters,
                regions={name: len(calls) for name, calls in calls_by_region(gm).items()},
                is_stored=compiler.count_of_stored_graphs() > before,
            )
        )
        return lambda *_: [zeros_like(output) for output in outputs]

    with fake_ranks(world_size, replicas) as mesh:
        model = sharded(build, call, mesh, shard)
        model.to_empty(device="cpu")
        try:
            torch.compile(model, backend=backend)(**call)
        finally:
            torch._dynamo.reset()
            retire(registered_in(model))
    check_compiled(found.graphs)
    return found
