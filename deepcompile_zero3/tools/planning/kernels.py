"""Splits a graph into the kernels that a compiler makes: fused operators and their costs."""

import operator
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import networkx
import torch
from torch import fx

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.alias import base_of, is_view
from deepcompile_zero3.graph.metadata import COMMENT, PARAMETER
from deepcompile_zero3.graph.size import nbytes_of
from deepcompile_zero3.passes.reduce import ReductionComment
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops
from deepcompile_zero3.torch_internals import compiler

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """Operators that run as one kernel, or the matrix product that a reduction computes."""

    nodes: tuple[fx.Node, ...]  # in the graph's order
    flops: float  # of products, convolutions and attention; bytes hide other arithmetic
    dtype: torch.dtype  # of the computation
    nbytes: int  # read and written

    @property
    def name(self) -> str:
        """The operators, such as "mm" or "mul, add"; of many, the first two and the last."""
        names = list(dict.fromkeys(_name(node) for node in self.nodes))
        return ", ".join(names if len(names) < 4 else [*names[:2], "...", names[-1]])


Item: TypeAlias = Kernel | fx.Node  # a kernel, or a collective that computes nothing


def items_of(graph: fx.Graph) -> list[Item]:
    """Returns kernels and collectives in an order in which they can run, close to the graph's.

    Pointwise operators and reductions that feed each other directly are one kernel, as in
    Inductor. A kernel reads and writes memory once.
    """
    parts = _parts(graph)
    part_of = {node: number for number, part in enumerate(parts) for node in part}
    flow = networkx.DiGraph()
    flow.add_nodes_from(range(len(parts)))
    for number, part in enumerate(parts):
        sources = {part_of.get(source, number) for node in part for source in _sources(node)}
        flow.add_edges_from((source, number) for source in sources - {number})
    try:
        order = list(networkx.lexicographical_topological_sort(flow))
    except networkx.NetworkXUnfeasible as error:
        raise Zero3Error(
            "kernels of a graph wait for each other: please report this model"
        ) from error
    return [_item(parts[number]) for number in order if not all(map(is_inlined, parts[number]))]


def kernels_of(graph: fx.Graph) -> list[Kernel]:
    """Returns the kernels, and the matrix products that reductions compute."""
    return [item for item in items_of(graph) if isinstance(item, Kernel)]


def is_collective(node: fx.Node) -> bool:
    """Returns whether a node starts or awaits a collective of this library."""
    return node.target in (ops.all_gather_start.default, *WAITS, *REDUCTIONS)


def results_of(item: Item) -> list[fx.Node]:
    """Returns the nodes whose memory an item writes and others read, not a kernel's inner nodes."""
    if isinstance(item, fx.Node):
        return _several(item)
    inside = set(item.nodes)
    return [
        result
        for node in item.nodes
        if not is_inlined(node)
        for result in _several(node) or [node]
        if any(reader not in inside for reader in _readers(result))
    ]


def memory_of(item: Item) -> list[fx.Node]:
    """Returns the nodes outside an item, or graph inputs, whose memory it reads, each once."""
    nodes = item.nodes if isinstance(item, Kernel) else (item,)
    inside = set(nodes)
    bases = dict.fromkeys(base for node in nodes for base in map(base_of, node.all_input_nodes))
    # A parameter's placeholder has no memory: it identifies the parameter to operators.
    return [b for b in bases if _operator_of(b) not in inside and PARAMETER not in b.meta]


def is_inlined(node: fx.Node) -> bool:
    """Returns whether a node is a constant that is inlined into the code of its readers."""
    is_constant = _is_fused(node) and not node.all_input_nodes
    return is_constant and all(map(_is_fused, _readers(node)))


# ---- which operators are fused


def _parts(graph: fx.Graph) -> list[list[fx.Node]]:
    """Returns groups of nodes that run together, in the order of their first nodes.

    The nodes that feed an unfused operator and the nodes that it feeds are in different groups, so
    that no group waits for itself.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    depth: dict[fx.Node, int] = {}  # number of unfused operators on the path to a node
    together = networkx.Graph()
    for node in graph.nodes:
        depth[node] = max(map(depth.__getitem__, node.all_input_nodes), default=0)
        if node.op != "call_function" or is_view(node):
            continue
        together.add_node(node)
        if is_collective(node):
            depth[node] = 0  # not computed from a result that is read again
        elif not _is_fused(node):
            depth[node] += 1
        else:
            fused = (s for s in _sources(node) if _is_fused(s) and not is_inlined(s))
            together.add_edges_from((s, node) for s in fused if depth[s] == depth[node])
    parts = [
        sorted(part, key=order.__getitem__) for part in networkx.connected_components(together)
    ]
    return sorted(parts, key=lambda part: order[part[0]])


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch_internals.OpOverload):
        return False
    packet = target.overloadpacket
    if target.namespace not in ("aten", "prims") or packet in _APART or is_view(node):
        return False
    products = packet in compiler.flop_formulas() or packet in (*_LIKE, *_GROUPED)
    return not products and "backward" not in str(packet)


def _packets(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(aten, name) for name in names if hasattr(aten, name))


# Operators of aten that are neither pointwise nor reductions.
_APART = _packets(
    *("sort", "topk", "cumsum", "cumprod", "nonzero", "histc", "bincount", "randperm"),
    *("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "index_add"),
    *("scatter", "scatter_add", "scatter_reduce", "masked_scatter"),
    *("_grouped_mm", "_fused_rms_norm", "convolution_backward"),
)
_GROUPED = _packets("_grouped_mm")
# Lookups read as many bytes of a table as they return.
_LOOKUPS = _packets("embedding", "index", "gather", "index_select")
# Operators that have no FLOP formula in torch, and equivalent ones that have.
_FLASH = "_scaled_dot_product_flash_attention"
_LIKE = {
    getattr(aten, f"{_FLASH}_for_cpu{end}"): getattr(aten, f"{_FLASH}{end}")
    for end in ("", "_backward")
}


# ---- what they cost


def _item(nodes: list[fx.Node]) -> Item:
    first = nodes[0]
    if first.target is ops.reduce_mm.default:
        dtypes: ReductionComment = first.meta[COMMENT]
        nbytes = dtypes.numel * dtypes.wire.itemsize + sum(map(nbytes_of, memory_of(first)))
        return Kernel((first,), _flops(first), dtypes.raw, nbytes)
    if is_collective(first):
        return first
    kernel = Kernel(tuple(nodes), sum(map(_flops, nodes)), _dtype(first), 0)
    written = sum(nbytes_of(node) for node in results_of(kernel) if not is_inlined(node))
    return replace(kernel, nbytes=_bytes_read(nodes) + written)


def _bytes_read(nodes: list[fx.Node]) -> int:
    """Returns the bytes of the tensors, or of their views, that nodes read from outside."""
    inside = set(nodes)
    read: dict[fx.Node, dict[fx.Node, int]] = {}  # by tensor: bytes of each of its views
    for node in nodes:
        is_lookup = getattr(node.target, "overloadpacket", None) in _LOOKUPS
        for source in node.all_input_nodes:
            base = base_of(source)
            if _operator_of(base) not in inside and not is_inlined(base):
                nbytes = min(nbytes_of(source), nbytes_of(node) if is_lookup else sys.maxsize)
                views = read.setdefault(base, {})
                views[source] = max(views.get(source, 0), nbytes)
    return sum(min(sum(views.values()), nbytes_of(b) or sys.maxsize) for b, views in read.items())


def _flops(node: fx.Node) -> float:
    """Returns the FLOPs of a matrix product, a convolution or attention, and 0 for other nodes."""
    if not isinstance(node.target, torch_internals.OpOverload):
        return 0.0
    packet = node.target.overloadpacket
    arguments: Any = fx.map_arg(node.args, _value)
    keywords: Any = fx.map_arg(node.kwargs, _value)
    if node.target is ops.reduce_mm.default:
        left, right = arguments[0]
        return 2.0 * _int(left.numel()) * _int(right.shape[1])
    if packet in _GROUPED:
        return 2.0 * _int(arguments[0].numel()) * _int(arguments[1].shape[-1])
    formula = compiler.flop_formulas().get(_LIKE.get(packet, packet))
    if formula is None or compiler.free_unbacked_symbols((arguments, _value(node))):
        return 0.0
    flops = float(_int(formula(*arguments, **keywords, out_val=_value(node))))
    names = [argument.name for argument in torch_internals.schema_of(node.target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return flops / 2 if given.get("is_causal") else flops  # half of all pairs are computed


def _dtype(node: fx.Node) -> torch.dtype:
    """Returns the dtype that a node computes with."""
    values = map(_value, node.all_input_nodes)
    dtypes = (value.dtype for value in values if isinstance(value, torch.Tensor))
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


# ---- who reads what


def _sources(node: fx.Node) -> Iterable[fx.Node]:
    """Returns the operators whose results a node reads, through views."""
    return map(_operator_of, map(base_of, node.all_input_nodes))


def _operator_of(base: fx.Node) -> fx.Node:
    """Returns the node itself or, for one of several results, the operator that returns them."""
    return base.all_input_nodes[0] if base.target is operator.getitem else base


def _several(node: fx.Node) -> list[fx.Node]:
    """Returns the results of an operator that has several."""
    return [user for user in node.users if user.target is operator.getitem]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that read the memory of ``node``, through views; also the graph's output."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _int(number: Any) -> int:
    return 0 if compiler.free_unbacked_symbols(number) else int(number)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]
