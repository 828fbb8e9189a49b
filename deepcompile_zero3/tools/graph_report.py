"""Describes the gathers, kept parameters and reductions of a rewritten graph."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import fx

from deepcompile_zero3.codec import nbytes_of as nbytes_of_rows
from deepcompile_zero3.graph.alias import base_of, views_of
from deepcompile_zero3.graph.capture import CapturedGraph
from deepcompile_zero3.graph.metadata import COMMENT, formats_of, fqns_of
from deepcompile_zero3.graph.peak import gathered_items
from deepcompile_zero3.graph.size import nbytes_of, nbytes_of_tensor
from deepcompile_zero3.graph.text import short_name
from deepcompile_zero3.passes.graph_parameters import saved_outputs
from deepcompile_zero3.passes.reduce import ReductionComment
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops
from deepcompile_zero3.tools.table import Table, and_more, mib


@dataclass(frozen=True)
class GatherBucket:
    """Parameters that are gathered together."""

    parameters: tuple[str, ...]  #: FQNs, in order
    dtypes: tuple[str, ...]  #: the compute dtypes of the parameters, each once
    nbytes: int  #: of the full tensors
    starts_before: str  #: the operator that the gather starts before
    needed_by: str  #: the operator that waits for the gather
    ahead: int  #: the number of operators between the start and the wait
    formats: dict[str, str]  #: of the parameters that are quantized; see ``codec``


@dataclass(frozen=True)
class Gradient:
    """A gradient that is reduced."""

    parameter: str  #: FQN
    raw: str  #: the dtype that the gradient is computed in
    leaf: str  #: the dtype of the parameter's contract; "any" keeps the computed dtype
    wire: str  #: the dtype that the gradient is reduced in, or the format it is quantized in
    nbytes: int  #: of the full gradient on the wire
    is_copied: bool  #: into the send buffer; large products are computed there

    @property
    def dtypes(self) -> str:
        """The raw, the leaf's and the wire dtype, in the order in which the gradient has them."""
        return " -> ".join((self.raw, self.leaf, self.wire))


@dataclass(frozen=True)
class Graph:
    """A forward or backward graph."""

    direction: str  #: "forward" or "backward"
    gathers: tuple[GatherBucket, ...]  #: in the order in which they start
    gradients: tuple[Gradient, ...]  #: in the order in which they are reduced
    #: FQNs and bytes of the parameters that a forward keeps gathered for its backward.
    kept: dict[str, int]
    #: Maximum bytes of gathered parameters alive at once, as planned; without memory that ranks
    #: share and, in a backward, what its forward kept.
    gathered_peak: int
    #: Bytes of activations that a forward saves in memory, in a file, and in host memory beside a
    #: GPU. A data-dependent size counts as 0.
    saved: int
    in_file: int
    in_host_memory: int

    def parts(self) -> Iterator[str | Table]:
        """Yields the tables and lines of a text about the graph."""
        if self.gathers:
            columns = ("gathers", "dtype", "MiB", "starts before", "needed by", "ahead")
            rows = [
                (
                    and_more(bucket.parameters),
                    "/".join(bucket.dtypes),
                    mib(bucket.nbytes),
                    bucket.starts_before,
                    bucket.needed_by,
                    bucket.ahead,
                )
                for bucket in self.gathers
            ]
            yield Table("", columns, rows)
        if self.gradients:
            alike = [list(run) for _, run in groupby(self.gradients, lambda g: g.dtypes)]
            reduced = [
                (
                    and_more([gradient.parameter for gradient in run]),
                    run[0].dtypes,
                    mib(sum(gradient.nbytes for gradient in run)),
                    mib(sum(gradient.nbytes for gradient in run if gradient.is_copied)),
                )
                for run in alike
            ]
            yield Table("", ("reduces", "raw, leaf, wire", "MiB", "copied"), reduced)
        if self.kept:
            total = mib(sum(self.kept.values()))
            yield f"keeps {total} MiB that backward does not gather again: {and_more([*self.kept])}"
        if self.in_file:
            yield f"saves {mib(self.in_file)} MiB in a file, and {mib(self.saved)} in memory"
        if self.in_host_memory:
            host = mib(self.in_host_memory)
            yield f"saves {host} MiB in host memory, and {mib(self.saved)} on the GPU"


def graph_of(direction: str, captured: CapturedGraph, formats: Mapping[str, str]) -> Graph:
    """Returns what a captured graph gathers, keeps and reduces.

    ``formats`` are those of quantized gradients, by FQN; empty if not quantized.
    """
    graph = captured.inlined.graph
    saved = _saved(graph)
    stores: dict[Any, Any] = {n: n.args[0] for n in saved if n.target is ops.store_wait.default}
    in_file = {node for node, start in stores.items() if start.args[1:]}  # they name a tier
    return Graph(
        direction,
        gathers=tuple(_gathers(graph)),
        gradients=tuple(_gradients(graph, formats)),
        kept=dict(_kept(graph)) if direction == "forward" else {},
        gathered_peak=captured.gathered_peak,
        saved=sum(map(nbytes_of, saved - stores.keys())),
        in_file=sum(map(nbytes_of, in_file)),
        in_host_memory=sum(map(nbytes_of, stores.keys() - in_file)),
    )


def _gathers(graph: fx.Graph) -> Iterator[GatherBucket]:
    computation = [node for node in graph.nodes if _computes(node)]
    order = {node: position for position, node in enumerate(graph.nodes)}
    for start in graph.find_nodes(op="call_function", target=ops.all_gather_start.default):
        names = fqns_of(start)
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
            formats={name: f for name, f in zip(names, formats_of(start), strict=True) if f},
        )


def _gradients(graph: fx.Graph, formats: Mapping[str, str]) -> Iterator[Gradient]:
    for node in graph.nodes:
        if node.target not in REDUCTIONS:
            continue
        dtypes: ReductionComment = node.meta[COMMENT]
        [name] = fqns_of(node)
        placeholder: Any = node.args[1]
        rows, format = placeholder.meta["val"].shape[0], formats[name]
        yield Gradient(
            parameter=name,
            raw=short_name(dtypes.raw),
            leaf="any" if dtypes.leaf is None else short_name(dtypes.leaf),
            wire=format or short_name(dtypes.wire),
            nbytes=nbytes_of_rows(format, rows, dtypes.numel // rows)
            if format
            else dtypes.numel * dtypes.wire.itemsize,
            is_copied=node.target is ops.reduce_grad.default and not format,
        )


def _kept(graph: fx.Graph) -> Iterator[tuple[str, int]]:
    results = saved_outputs(graph)
    for wait in (node for node in graph.nodes if node.target in WAITS):
        start: Any = wait.args[0]
        names = fqns_of(start)
        for position, item in gathered_items(wait):
            if results & {item, *views_of(item)}:
                yield names[position], nbytes_of(item)


def _saved(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that a forward saves, one a storage, without inputs and parameters."""
    waits = [node for node in graph.nodes if node.target in WAITS]
    gathered = {view for wait in waits for view in views_of(wait)}
    bases = {base_of(node) for node in saved_outputs(graph)}
    return {node for node in bases if node.op == "call_function"} - gathered


def _computes(node: fx.Node) -> bool:
    ours = (*REDUCTIONS, *WAITS, ops.all_gather_start.default, operator.getitem)
    return node.op == "call_function" and node.target not in ours


def _name(nodes: list[fx.Node]) -> str:
    """Returns the operator of the first node, such as ``mm``."""
    return getattr(nodes[0].target, "__name__", "").split(".")[0] if nodes else "the end"
