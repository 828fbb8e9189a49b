"""``explain``: what the compiler makes of a sharded model, before a step is taken."""

import contextlib
import functools
import io
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.backend import saved_outputs, zero3
from deepcompile_zero3.capture import CapturedGraph, CapturedGraphs, capture_graphs
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph_text import COMMENT, base_of, short_name, views_of
from deepcompile_zero3.module import all_parameters_of
from deepcompile_zero3.parameter import ShardedParameter, version_of
from deepcompile_zero3.passes.reduce import GradientDtypes
from deepcompile_zero3.peak import gathered_items, nbytes_of, nbytes_of_tensor
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops


@dataclass(frozen=True)
class GatherBucket:
    """Parameters that are gathered together.

    Attributes:
        parameters: their names, in order.
        dtypes: that they are computed with, each once.
        nbytes: of the full tensors.
        starts_before: the operator that the gather starts ahead of.
        needed_by: the operator that waits for it.
        ahead: how many operators lie between.
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
        parameter: its name.
        raw: the dtype that it is computed in.
        leaf: the dtype of the parameter's contract; "any" keeps what arrives.
        wire: the dtype that it is reduced in.
        nbytes: of the full gradient on the wire.
        is_copied: whether it is copied to where it is sent from; large products are computed there.
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
        gathers: in the order in which they start.
        gradients: in the order in which they are reduced.
        kept: names of the parameters that this forward keeps for its backward, and their bytes,
            which backward does not gather again.
        gathered_peak: bytes of gathered parameters that are alive at once at most, by the plan,
            without what ranks share and, in a backward, what its forward kept.
        saved: bytes of activations that this forward saves for its backward. A size that depends
            on data counts as nothing.
    """

    direction: str
    gathers: tuple[GatherBucket, ...]
    gradients: tuple[Gradient, ...]
    kept: dict[str, int]
    gathered_peak: int
    saved: int


@dataclass(frozen=True)
class Report:
    """What a step of a sharded model does, on each rank. ``print`` it, or see :meth:`to_dict`.

    Attributes:
        model: the name of its class.
        world_size: ranks that a parameter is sharded over, at most.
        is_shared: whether ranks of one host share memory for all parameters, so that nothing goes
            over a wire.
        parameters: how many are sharded.
        nbytes: of all of them, full, as they are computed with.
        shards: bytes of this rank's shards.
        graphs: forwards, then backwards, each in the order of compilation.
        breaks: why Dynamo broke the graph, in its words; what is between two graphs runs in eager
            code.
        in_eager: parameters that no graph gathers; eager code that reads them does.
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

    @property
    def gathered(self) -> int:
        """Bytes of full parameters that a step gathers which runs each graph once."""
        return sum(bucket.nbytes for graph in self.graphs for bucket in graph.gathers)

    @property
    def reduced(self) -> int:
        """Bytes of full gradients that a step reduces: those of a parameter are summed before."""
        gradients = (gradient for graph in self.graphs for gradient in graph.gradients)
        return sum({gradient.parameter: gradient.nbytes for gradient in gradients}.values())

    def to_dict(self) -> dict[str, Any]:
        """The attributes as numbers, strings, lists and dicts, for JSON."""
        return asdict(self) | {"gathered": self.gathered, "reduced": self.reduced}

    def __str__(self) -> str:
        text = io.StringIO()
        console = Console(file=text, width=80, color_system=None)
        for part in _parts(self):
            console.print(part, highlight=False, markup=False)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def explain(
    model: nn.Module, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Report:
    """Compiles a call of a sharded model, and says what its graphs gather, keep and reduce.

    It calls the model once, which gathers what the call needs: collective. Nothing is trained: no
    backward runs, and buffers and the state of torch's random numbers are as before. What the user
    has compiled, or compiles later, is not touched.

    Args:
        model: a sharded model, compiled or not.
        args: of the call. The report is for a batch of this size.
        options: those of ``torch.compile(model, backend="zero3", options=...)``.
        kwargs: of the call.

    Raises:
        Zero3Error: nothing in ``model`` is sharded, or no graph was compiled.
        TypeError: ``model`` is no module.
        ValueError: an unknown option. What the model raises is passed on.

    Example::

        fully_shard(model)
        print(explain(model, input_ids=text, labels=text))
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
    parameters = all_parameters_of(model, "explain")
    breaks_before = torch_internals.graph_breaks()
    with capture_graphs() as graphs, without_a_trace(model, parameters):
        backend = functools.partial(zero3, options=options)
        torch_internals.call_compiled_apart(model, backend, args, kwargs)
    if not graphs.forward:
        raise Zero3Error(
            "explain has nothing to say: no graph was compiled. Is torch.compile disabled, as by "
            "TORCHDYNAMO_DISABLE=1, or the whole call?"
        )
    breaks = tuple(torch_internals.graph_breaks() - breaks_before)
    return report_of(model, parameters, graphs, breaks)


def report_of(
    model: nn.Module,
    parameters: Sequence[ShardedParameter],
    graphs: CapturedGraphs,
    breaks: tuple[str, ...],
) -> Report:
    """The report of a model whose graphs were captured."""
    described = [_describe("forward", graph) for graph in graphs.forward]
    described += [_describe("backward", graph) for graph in graphs.backward]
    buckets = [bucket for graph in described for bucket in graph.gathers]
    gathered = {name for bucket in buckets for name in bucket.parameters}
    placeholders = [parameter.placeholder for parameter in parameters]
    shards = [torch_internals.local_tensor(parameter.shard) for parameter in parameters]
    return Report(
        model=type(model).__name__.removeprefix("Zero3"),
        world_size=max(parameter.handle.world_size for parameter in parameters),
        is_shared=all(parameter.handle.is_shared for parameter in parameters),
        parameters=len(parameters),
        nbytes=sum(map(nbytes_of_tensor, placeholders)),
        shards=sum(map(nbytes_of_tensor, shards)),
        graphs=tuple(described),
        breaks=breaks,
        in_eager=tuple(p.fqn for p in parameters if p.fqn not in gathered),
    )


@contextlib.contextmanager
def without_a_trace(model: nn.Module, parameters: Sequence[ShardedParameter]) -> Iterator[None]:
    """What a forward changes, and what compiling one does, is as before after the block."""
    buffers = [
        (owner, name, buffer, version_of(buffer), buffer.detach().clone())
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    kept_bytes = [parameter.kept_bytes for parameter in parameters]
    devices = {p.handle.device.index for p in parameters if p.handle.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)), torch.enable_grad():
        try:
            yield
        finally:
            for parameter, nbytes in zip(parameters, kept_bytes, strict=True):
                parameter.kept_bytes = nbytes
            for owner, name, buffer, version, before in buffers:
                setattr(owner, name, buffer)
                if version_of(buffer) != version:
                    with torch.no_grad():
                        buffer.copy_(before)


def _describe(direction: str, captured: CapturedGraph) -> Graph:
    graph = captured.graph_module.graph
    return Graph(
        direction,
        gathers=tuple(_gathers(graph)),
        gradients=tuple(_gradients(graph)),
        kept=dict(_kept(graph)) if direction == "forward" else {},
        gathered_peak=captured.gathered_peak,
        saved=sum(map(nbytes_of, _saved(graph))),
    )


def _gathers(graph: fx.Graph) -> Iterator[GatherBucket]:
    computation = [node for node in graph.nodes if _computes(node)]
    order = {node: position for position, node in enumerate(graph.nodes)}
    for start in graph.find_nodes(op="call_function", target=ops.all_gather_start.default):
        names: Any = start.args[1]
        wait = next(user for user in start.users if user.target in WAITS and user.args[0] is start)
        values = wait.meta["val"][: len(names)]
        between = [node for node in computation if order[start] < order[node] < order[wait]]
        after = [node for node in computation if order[node] > order[wait]]
        yield GatherBucket(
            parameters=tuple(names),
            dtypes=tuple(dict.fromkeys(short_name(value.dtype) for value in values)),
            nbytes=sum(map(nbytes_of_tensor, values)),
            starts_before=_name((between + after)[:1]),
            needed_by=_name(after[:1]),
            ahead=len(between),
        )


def _gradients(graph: fx.Graph) -> Iterator[Gradient]:
    for node in graph.nodes:
        if node.target not in REDUCTIONS:
            continue
        dtypes: GradientDtypes = node.meta[COMMENT]
        yield Gradient(
            parameter=node.args[1],
            raw=short_name(dtypes.raw),
            leaf="any" if dtypes.leaf is None else short_name(dtypes.leaf),
            wire=short_name(dtypes.wire),
            nbytes=dtypes.numel * dtypes.wire.itemsize,
            is_copied=node.target is ops.reduce_grad.default,
        )


def _kept(graph: fx.Graph) -> Iterator[tuple[str, int]]:
    results = saved_outputs(graph)
    for wait in (node for node in graph.nodes if node.target in WAITS):
        names: Any = wait.args[0].args[1]
        for position, item in gathered_items(wait):
            if results & {item, *views_of(item)}:
                yield names[position], nbytes_of(item)


def _saved(graph: fx.Graph) -> set[fx.Node]:
    """What a forward saves, but for its inputs and parameters: each memory once."""
    waits = [node for node in graph.nodes if node.target in WAITS]
    gathered = {view for wait in waits for view in views_of(wait)}
    bases = {base_of(node) for node in saved_outputs(graph)}
    return {node for node in bases if node.op == "call_function"} - gathered


def _computes(node: fx.Node) -> bool:
    ours = (*REDUCTIONS, *WAITS, ops.all_gather_start.default, operator.getitem)
    return node.op == "call_function" and node.target not in ours


def _name(nodes: list[fx.Node]) -> str:
    """The operator of the first, as ``mm``."""
    return getattr(nodes[0].target, "__name__", "").split(".")[0] if nodes else "the end"


# ---- as text


def _parts(report: Report) -> Iterator[Any]:
    transport = "in memory that they share" if report.is_shared else "by messages"
    ranks = f"{report.world_size} ranks" if report.world_size > 1 else "1 rank"
    yield (
        f"{report.model}: {report.parameters} parameters of {_mib(report.nbytes)} over {ranks}, "
        f"{transport}"
    )
    yield (
        f"at rest {_mib(report.shards)} of shards; a step gathers {_mib(report.gathered)} and "
        f"reduces {_mib(report.reduced)}"
    )
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
        first = reason.partition("\n")[0]
        yield ""
        yield f"the graph breaks: {first}"


def _alike(gradients: Iterable[Gradient]) -> Iterator[tuple[Gradient, ...]]:
    """Neighbours of the same dtypes, together."""
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
