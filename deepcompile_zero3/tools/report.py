"""The report of a sharded model's step: as data, as text and as a page."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from deepcompile_zero3.graph.capture import CapturedGraphs
from deepcompile_zero3.graph.size import nbytes_in_memory, nbytes_of_tensor
from deepcompile_zero3.sharding.forward.swap import original_class
from deepcompile_zero3.sharding.model import by_fqn
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.tools.document import Document
from deepcompile_zero3.tools.graph_report import Graph, graph_of
from deepcompile_zero3.tools.quantized import Quantized, quantized, table_of
from deepcompile_zero3.tools.table import Cell, Table, and_more, mib
from deepcompile_zero3.tools.timeline import Timeline
from deepcompile_zero3.torch_internals import local_tensor


@dataclass(frozen=True)
class Report(Document):
    """The work of each rank in a step of a sharded model. ``print`` it, or see :meth:`to_dict`.

    Attributes:
        model: the name of the model's class.
        world_size: the largest number of ranks that a parameter is sharded over.
        is_shared: whether ranks of one host share memory for all parameters, so that nothing is
            sent over a wire.
        parameters: the number of sharded parameters.
        nbytes: bytes of all full parameters, in the dtypes that they are computed with.
        shards: bytes of this rank's shards.
        graphs: forwards, then backwards, each in the order of compilation.
        breaks: Dynamo's messages of where and why it broke the graph; code between two graphs runs
            eagerly.
        quantized: the parameters whose shards are quantized before they are gathered.
        in_eager: FQNs of parameters that no graph gathers; eager code that reads them gathers them.
        timeline: the predicted timeline of a step that runs each graph once.
    """

    model: str
    world_size: int
    is_shared: bool
    parameters: int
    nbytes: int
    shards: int
    graphs: tuple[Graph, ...]
    breaks: tuple[str, ...]
    quantized: tuple[Quantized, ...]
    in_eager: tuple[str, ...]
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def gathered(self) -> int:
        """Bytes of full parameters that are gathered by a step that runs each graph once."""
        return sum(bucket.nbytes for graph in self.graphs for bucket in graph.gathers)

    @property
    def reduced(self) -> int:
        """Bytes of full gradients that a step reduces; a parameter's gradients are summed first."""
        gradients = (gradient for graph in self.graphs for gradient in graph.gradients)
        return sum({gradient.parameter: gradient.nbytes for gradient in gradients}.values())

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind of memory at the timeline's peak, with the optimizer's state. Ranks are
        assumed to exchange messages, even if they share memory.
        """
        return self.timeline.peak

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as numbers, strings, lists and dicts, for JSON."""
        told = asdict(replace(self, timeline=Timeline("", ())))
        del told["timeline"]
        return told | {"gathered": self.gathered, "reduced": self.reduced, "peak": self.peak}

    def _title(self) -> str:
        return self.model

    def _timelines(self) -> tuple[Timeline]:
        return (self.timeline,)

    def _parts(self) -> Iterator[str | Table]:
        transport = "in memory that they share" if self.is_shared else "by messages"
        ranks = f"{self.world_size} ranks" if self.world_size > 1 else "1 rank"
        yield (
            f"{self.model}: {self.parameters} parameters of {mib(self.nbytes)} MiB over {ranks}, "
            f"{transport}"
        )
        graphs = "what is compiled" if self.in_eager else "a step"
        yield (
            f"at rest {mib(self.shards)} MiB of shards; {graphs} gathers {mib(self.gathered)} MiB "
            f"and reduces {mib(self.reduced)} MiB"
        )
        if self.peak:
            kinds = ", ".join(f"{kind} {mib(n)}" for kind, n in self.peak.items() if n)
            where = " by messages" if self.is_shared else ""
            yield f"predicted peak{where} {mib(sum(self.peak.values()))} MiB: {kinds}"
        keeps = ", beside what forward kept" if any(graph.kept for graph in self.graphs) else ""
        numbers: Counter[str] = Counter()
        for graph in self.graphs:
            yield ""
            is_forward = graph.direction == "forward"
            more = f", {mib(graph.saved)} MiB of activations saved" if is_forward else keeps
            name = f"{graph.direction} {numbers[graph.direction]}"
            gathered = f"at most {mib(graph.gathered_peak)} MiB gathered at once"
            if self.is_shared and graph.gathers and not graph.gathered_peak:
                gathered = "all parameters are read in the memory that ranks share"
            yield f"{name}: {gathered}{more}"
            yield from graph.parts()
            numbers[graph.direction] += 1
        if self.quantized:
            yield ""
            yield table_of(self.quantized)
        if self.in_eager:
            yield ""
            yield f"gathered by eager code, if it reads them: {and_more(self.in_eager)}"
        for reason in self.breaks:
            yield ""
            yield line_of_break(reason)

    def _tables(self) -> list[Table]:
        gathers = Counter(
            (name, graph.direction)
            for graph in self.graphs
            for bucket in graph.gathers
            for name in bucket.parameters
        )
        gradients = {g.parameter: g for graph in self.graphs for g in graph.gradients}
        kept = {name for graph in self.graphs for name in graph.kept}
        rows: list[tuple[Cell, ...]] = []
        for name in dict.fromkeys(name for name, _ in gathers):
            gradient = gradients.get(name)
            reduced = (gradient.dtypes, gradient.nbytes / 2**20) if gradient else ("", 0.0)
            counts = gathers[name, "forward"], gathers[name, "backward"]
            rows.append((name, *counts, "kept" if name in kept else "", *reduced))
        columns = ("parameter", "gathers forward", "backward", "", "gradient", "MiB")
        return [Table("Parameters", columns, rows), *super()._tables()]


def line_of_break(reason: str) -> str:
    """Returns the first line of Dynamo's reason for a graph break."""
    first = reason.strip().partition("\n")[0]
    return f"the graph breaks: {first}"


def report_of(
    model: nn.Module,
    parameters: Sequence[ShardedParameter],
    graphs: CapturedGraphs,
    breaks: tuple[str, ...],
    timeline: Timeline,
) -> Report:
    """Returns the report of a model whose graphs were captured."""
    formats = {p.fqn: p.settings.gradient_dtypes.quantized for p in parameters}
    described = [graph_of("forward", graph, formats) for graph in graphs.forward]
    described += [graph_of("backward", graph, formats) for graph in graphs.backward]
    buckets = [bucket for graph in described for bucket in graph.gathers]
    gathered = {name for bucket in buckets for name in bucket.parameters}
    return Report(
        model=original_class(model).__name__,
        world_size=max(p.handle.world_size for p in parameters),
        is_shared=not any(p.handle.can.sends_messages for p in parameters),
        parameters=len(parameters),
        nbytes=sum(nbytes_of_tensor(p.placeholder) for p in parameters),
        shards=sum(nbytes_in_memory(local_tensor(p.shard)) for p in parameters),
        graphs=tuple(described),
        breaks=breaks,
        quantized=quantized(parameters, {k: f for b in buckets for k, f in b.formats.items()}),
        in_eager=tuple(p.fqn for p in parameters if gathered.isdisjoint(by_fqn([p]))),
        timeline=timeline,
    )
