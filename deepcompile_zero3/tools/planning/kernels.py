"""Splits a graph into the kernels that a compiler makes: fused operators and their costs."""

import heapq
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

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
    """Operators that run as one kernel.

    Attributes:
        nodes: nodes of the graph, in its order.
        flops: FLOPs of matrix products, convolutions and attention; other arithmetic is hidden
            behind memory traffic.
        dtype: the dtype of the computation.
        nbytes: bytes read and written.
    """

    nodes: tuple[fx.Node, ...]
    flops: float
    dtype: torch.dtype
    nbytes: int

    @property
    def name(self) -> str:
        """The operators, such as "mm" or "mul, add"; of many, the first two and the last."""
        names = list(dict.fromkeys(_name(node) for node in self.nodes))
        return ", ".join(names if len(names) < 4 else [*names[:2], "...", names[-1]])


# A collective is its node.
Item: TypeAlias = Kernel | fx.Node


def items_of(graph: fx.Graph) -> list[Item]:
    """Returns kernels and collectives in an order in which they can run, close to the graph's.

    Pointwise operators and reductions that feed each other directly are one kernel, as in
    Inductor. A kernel reads and writes memory once.
    """
    parts = _parts(graph)
    order = {node: position for position, node in enumerate(graph.nodes)}
    part_of = {node: number for number, part in enumerate(parts) for node in part}
    users: list[set[int]] = [set() for _ in parts]
    missing = [0] * len(parts)
    for number, part in enumerate(parts):
        sources = {part_of.get(source) for node in part for source in _sources(node)}
        for source in sources - {None, number}:
            users[source].add(number)  # type: ignore[index]
            missing[number] += 1
    ready = [(order[part[0]], number) for number, part in enumerate(parts) if not missing[number]]
    heapq.heapify(ready)
    result: list[Item] = []
    while ready:
        _, number = heapq.heappop(ready)
        part = parts[number]
        if not all(map(is_inlined, part)):
            result.append(part[0] if is_collective(part[0]) else _kernel(part))
        for user in users[number]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (order[parts[user][0]], user))
    if any(missing):
        raise Zero3Error("kernels of a graph wait for each other: please report this model")
    return result


def kernels_of(graph: fx.Graph) -> list[Kernel]:
    """Returns the kernels, and the matrix products that reductions compute."""
    return [
        item if isinstance(item, Kernel) else product_of(item)
        for item in items_of(graph)
        if isinstance(item, Kernel) or item.target is ops.reduce_mm.default
    ]


def product_of(reduction: fx.Node) -> Kernel:
    """Returns the matrix product of a reduction that takes the factors of a gradient."""
    dtypes: ReductionComment = reduction.meta[COMMENT]
    nbytes = dtypes.numel * dtypes.wire.itemsize + sum(map(nbytes_of, memory_of(reduction)))
    return Kernel((reduction,), product_flops(reduction), dtypes.raw, nbytes)


def is_collective(node: fx.Node) -> bool:
    """Returns whether a node starts or awaits a collective of this library."""
    return node.target in (ops.all_gather_start.default, *WAITS, *REDUCTIONS)


def results_of(item: Item) -> list[fx.Node]:
    """Returns the nodes whose memory an item writes and others read, not a kernel's inner nodes."""
    if isinstance(item, fx.Node):
        return [user for user in item.users if user.target is operator.getitem]
    inside = set(item.nodes)
    results = []
    for node in item.nodes:
        if is_inlined(node):
            continue
        several = [user for user in node.users if user.target is operator.getitem]
        for result in several or [node]:
            if any(reader not in inside for reader in _readers(result)):
                results.append(result)
    return results


def memory_of(item: Item) -> list[fx.Node]:
    """Returns the nodes outside an item, or graph inputs, whose memory it reads, each once."""
    nodes = item.nodes if isinstance(item, Kernel) else (item,)
    inside = set(nodes)
    bases = dict.fromkeys(base for node in nodes for base in map(base_of, node.all_input_nodes))
    # A parameter's placeholder has no memory: it identifies the parameter to operators.
    return [b for b in bases if _operator_of(b) not in inside and PARAMETER not in b.meta]


def product_flops(node: fx.Node) -> float:
    """Returns the FLOPs of a matrix product, a convolution or attention, and 0 for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0.0
    packet = node.target.overloadpacket
    arguments: Any = fx.map_arg(node.args, _value)
    keywords: Any = fx.map_arg(node.kwargs, _value)
    if node.target is ops.reduce_mm.default:
        left, right = arguments[0]
        return 2.0 * _int(left.numel()) * _int(right.shape[1])
    if packet in _GROUPED:
        return 2.0 * _int(arguments[0].numel()) * _int(arguments[1].shape[-1])
    packet = _LIKE.get(packet, packet)
    formula = compiler.flop_formulas().get(packet)
    if formula is None or compiler.free_unbacked_symbols((arguments, _value(node))):
        return 0.0
    flops = float(_int(formula(*arguments, **keywords, out_val=_value(node))))
    return flops / 2 if _is_causal(node) else flops


# ---- which operators are fused


def _parts(graph: fx.Graph) -> list[list[fx.Node]]:
    """Returns groups of nodes that run together. The nodes that feed an unfused operator and the
    nodes that it feeds are in different groups, so that no group waits for itself.
    """
    inlined = {node for node in graph.nodes if is_inlined(node)}
    depth: dict[fx.Node, int] = {}  # number of unfused operators on the path to a node
    leader: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        depth[node] = max(map(depth.__getitem__, node.all_input_nodes), default=0)
        if node.op != "call_function" or is_view(node):
            continue
        leader[node] = node
        members[node] = [node]
        if is_collective(node):
            depth[node] = 0  # not computed from a result that is read again
        elif not _is_fused(node):
            depth[node] += 1
        for source in dict.fromkeys(_sources(node)):
            both = source in leader and _is_fused(source) and _is_fused(node)
            if both and depth[source] == depth[node] and source not in inlined:
                into, other = leader[source], leader[node]
                if into is not other:
                    for moved in members.pop(other):
                        leader[moved] = into
                        members[into].append(moved)
    order = {node: position for position, node in enumerate(graph.nodes)}
    return [sorted(part, key=order.__getitem__) for part in members.values()]


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
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
    "sort",
    "topk",
    "cumsum",
    "cumprod",
    "nonzero",
    "histc",
    "bincount",
    "index_put",
    "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    "index_add",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "masked_scatter",
    "randperm",
    "_grouped_mm",
    "_fused_rms_norm",
    "convolution_backward",
)
_GROUPED = _packets("_grouped_mm")
# Lookups read as many bytes of a table as they return.
_LOOKUPS = (
    aten.embedding.default,
    aten.index.Tensor,
    aten.gather.default,
    aten.index_select.default,
)
# Operators that have no FLOP formula in torch, and equivalent ones that have.
_LIKE = {
    ours: getattr(aten, theirs)
    for ours, theirs in zip(
        _packets(
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
        strict=False,
    )
}


def _is_causal(node: fx.Node) -> bool:
    """Returns whether a node is causal attention, which computes half of all pairs."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "is_causal" not in names:
        return False
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("is_causal"))


# ---- what they cost


def _kernel(nodes: list[fx.Node]) -> Kernel:
    inside = set(nodes)
    read: dict[fx.Node, dict[fx.Node, int]] = {}  # by tensor: bytes of each of its views
    for node in nodes:
        for source in node.all_input_nodes:
            base = base_of(source)
            if _operator_of(base) not in inside and not is_inlined(base):
                nbytes = nbytes_of(source)
                if node.target in _LOOKUPS:
                    nbytes = min(nbytes, nbytes_of(node))
                views = read.setdefault(base, {})
                views[source] = max(views.get(source, 0), nbytes)
    probe = Kernel(tuple(nodes), 0.0, torch.float32, 0)
    written = sum(nbytes_of(node) for node in results_of(probe) if not is_inlined(node))
    flops = sum(map(product_flops, nodes))
    nbytes = sum(min(sum(views.values()), nbytes_of(b) or sys.maxsize) for b, views in read.items())
    return Kernel(tuple(nodes), flops, _dtype(nodes[0]), nbytes + written)


def is_inlined(node: fx.Node) -> bool:
    """Returns whether a node is a constant that is inlined into the code of its readers."""
    is_constant = _is_fused(node) and not node.all_input_nodes
    return is_constant and all(map(_is_fused, _readers(node)))


def _dtype(node: fx.Node) -> torch.dtype:
    """Returns the dtype that a node computes with."""
    for source in node.all_input_nodes:
        value = _value(source)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.dtype
    return torch.float32


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Returns the operators whose results a node reads, through views."""
    return map(_operator_of, map(base_of, node.all_input_nodes))


def _operator_of(base: fx.Node) -> fx.Node:
    """Returns the node itself or, for one of several results, the operator that returns them."""
    return base.all_input_nodes[0] if base.target is operator.getitem else base


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
