"""The report of a sharded model's step: as data, as text and as a page."""

import io
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from deepcompile_zero3.tools import page
from deepcompile_zero3.tools.timeline import Timeline


@dataclass(frozen=True)
class GatherBucket:
    """Parameters that are gathered together.

    Attributes:
        parameters: FQNs of the parameters, in order.
        dtypes: dtypes that the parameters are computed with, each once.
        nbytes: bytes of the full tensors.
        starts_before: the operator that the gather starts before.
        needed_by: the operator that waits for the gather.
        ahead: the number of operators between the start and the wait.
    """

    parameters: tuple[str, ...]
    dtypes: tuple[str, ...]
    nbytes: int
    starts_before: str
    needed_by: str
    ahead: int


@dataclass(frozen=True)
class Gradient:
    """A gradient that is reduced.

    Attributes:
        parameter: FQN of the parameter.
        raw: the dtype that the gradient is computed in.
        leaf: the gradient dtype of the parameter's contract; "any" keeps the computed dtype.
        wire: the dtype that the gradient is reduced in.
        nbytes: bytes of the full gradient on the wire.
        is_copied: whether the gradient is copied into the send buffer; large products are computed
            there.
    """

    parameter: str
    raw: str
    leaf: str
    wire: str
    nbytes: int
    is_copied: bool


@dataclass(frozen=True)
class Graph:
    """A forward or backward graph.

    Attributes:
        direction: "forward" or "backward".
        gathers: buckets, in the order in which their gathers start.
        gradients: gradients, in the order in which they are reduced.
        kept: FQNs of the parameters that this forward keeps for its backward, and their bytes.
            The backward does not gather them again.
        gathered_peak: the planned maximum of bytes of gathered parameters that are alive at once,
            without memory that ranks share and, in a backward, parameters that its forward kept.
        saved: bytes of activations that this forward saves for its backward. A data-dependent
            size counts as 0.
    """

    direction: str
    gathers: tuple[GatherBucket, ...]
    gradients: tuple[Gradient, ...]
    kept: dict[str, int]
    gathered_peak: int
    saved: int


@dataclass(frozen=True)
class Report:
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
    in_eager: tuple[str, ...]
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def gathered(self) -> int:
        """Bytes of full parameters that are gathered by a step that runs each graph once."""
        return sum(bucket.nbytes for graph in self.graphs for bucket in graph.gathers)

    @property
    def reduced(self) -> int:
        """Bytes of full gradients that a step reduces: a parameter's gradients are summed first."""
        gradients = (gradient for graph in self.graphs for gradient in graph.gradients)
        return sum({gradient.parameter: gradient.nbytes for gradient in gradients}.values())

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind of memory at the timeline's peak, with the optimizer's state. Ranks are
        assumed to exchange messages, even if they share memory.
        """
        _, nbytes = max(self.timeline.memory, key=lambda point: sum(point[1]), default=(0.0, ()))
        return dict(zip(self.timeline.kinds, nbytes, strict=True)) if nbytes else {}

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as numbers, strings, lists and dicts, for JSON."""
        told = asdict(replace(self, timeline=Timeline("", ())))
        del told["timeline"]
        return told | {"gathered": self.gathered, "reduced": self.reduced, "peak": self.peak}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the timeline and searchable tables: see :func:`page.save_page`."""
        tables = tables_of(self, self.timeline)
        page.save_page(path, self.model, str(self), [self.timeline], tables)

    def __str__(self) -> str:
        return text_of(_parts(self))


# ---- as text


def text_of(parts: Iterable[Any]) -> str:
    """Returns the parts as rich prints them, 80 columns wide."""
    text = io.StringIO()
    console = Console(file=text, width=80, color_system=None)
    for part in parts:
        console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _parts(report: Report) -> Iterator[Any]:
    transport = "in memory that they share" if report.is_shared else "by messages"
    ranks = f"{report.world_size} ranks" if report.world_size > 1 else "1 rank"
    yield (
        f"{report.model}: {report.parameters} parameters of {_mib(report.nbytes)} over {ranks}, "
        f"{transport}"
    )
    graphs = "what is compiled" if report.in_eager else "a step"
    yield (
        f"at rest {_mib(report.shards)} of shards; {graphs} gathers {_mib(report.gathered)} and "
        f"reduces {_mib(report.reduced)}"
    )
    if report.peak:
        kinds = ", ".join(f"{kind} {_number(n)}" for kind, n in report.peak.items() if n)
        where = " by messages" if report.is_shared else ""
        yield f"predicted peak{where} {_mib(sum(report.peak.values()))}: {kinds}"
    counts = {"forward": itertools.count(), "backward": itertools.count()}
    for graph in report.graphs:
        yield ""
        name = f"{graph.direction} {next(counts[graph.direction])}"
        peak = f"{name}: at most {_mib(graph.gathered_peak)} gathered at once"
        if graph.direction == "forward":
            yield f"{peak}, {_mib(graph.saved)} of activations saved"
        else:
            keeps = any(other.kept for other in report.graphs)
            yield peak + (", beside what forward kept" if keeps else "")
        if graph.gathers:
            yield _table(
                ("gathers", "dtype", "MiB", "starts before", "needed by", "ahead"),
                (
                    (
                        _names(bucket.parameters),
                        "/".join(bucket.dtypes),
                        _number(bucket.nbytes),
                        bucket.starts_before,
                        bucket.needed_by,
                        str(bucket.ahead),
                    )
                    for bucket in graph.gathers
                ),
            )
        if graph.gradients:
            yield _table(
                ("reduces", "raw, leaf, wire", "MiB", "copied"),
                (
                    (
                        _names(tuple(gradient.parameter for gradient in run)),
                        " -> ".join(_dtypes(run[0])),
                        _number(sum(gradient.nbytes for gradient in run)),
                        _number(sum(gradient.nbytes for gradient in run if gradient.is_copied)),
                    )
                    for run in _alike(graph.gradients)
                ),
            )
        if graph.kept:
            total = _mib(sum(graph.kept.values()))
            yield f"keeps {total} that backward does not gather again: {_names(tuple(graph.kept))}"
    if report.in_eager:
        yield ""
        yield f"gathered by eager code, if it reads them: {_names(report.in_eager)}"
    for reason in report.breaks:
        yield ""
        yield line_of_break(reason)


def line_of_break(reason: str) -> str:
    """Returns the first line of Dynamo's reason for a graph break."""
    first = reason.strip().partition("\n")[0]
    return f"the graph breaks: {first}"


def _alike(gradients: Iterable[Gradient]) -> Iterator[tuple[Gradient, ...]]:
    """Yields runs of neighbouring gradients with the same dtypes."""
    for _, run in itertools.groupby(gradients, _dtypes):
        yield tuple(run)


def _dtypes(gradient: Gradient) -> tuple[str, str, str]:
    return gradient.raw, gradient.leaf, gradient.wire


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for column in columns:
        numbers = column in ("MiB", "ahead", "copied")
        if numbers:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _names(names: tuple[str, ...]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _number(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.{1 if nbytes >= 10 * 2**20 else 3}f}"


def _mib(nbytes: int) -> str:
    return f"{_number(nbytes)} MiB"


# ---- as a page


def tables_of(report: Report, timeline: Timeline) -> list[page.Table]:
    """Returns tables of a report's parameters and of a timeline's collectives."""
    gathers: dict[str, list[int]] = {}
    for graph in report.graphs:
        for bucket in graph.gathers:
            for name in bucket.parameters:
                gathers.setdefault(name, [0, 0])[graph.direction == "backward"] += 1
    gradients = {g.parameter: g for graph in report.graphs for g in graph.gradients}
    kept = {name for graph in report.graphs for name in graph.kept}
    parameters = tuple(
        (
            name,
            *counts,
            "kept" if name in kept else "",
            " -> ".join((g.raw, g.leaf, g.wire)) if (g := gradients.get(name)) else "",
            g.nbytes / 2**20 if g else 0.0,
        )
        for name, counts in gathers.items()
    )
    columns = ("parameter", "gathers forward", "backward", "", "gradient", "MiB")
    collectives = tuple(
        (
            span.name,
            ", ".join(span.parameters),
            span.nbytes / 2**20,
            span.start * 1e3,
            (span.end - span.start) * 1e3,
        )
        for span in timeline.spans
        if span.lane in ("gather", "reduce")
    )
    when = ("collective", "parameters", "MiB", "starts, ms", "takes, ms")
    return [
        page.Table("Parameters", columns, parameters),
        page.Table("Collectives", when, collectives),
    ]
