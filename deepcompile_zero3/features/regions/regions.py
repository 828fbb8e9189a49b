"""Outlines equal blocks of a model into regions, so that one compilation serves all of them.

Dynamo's graph has the operations of each block in full. :func:`outline_regions` replaces those of
equal blocks by calls of one subgraph, torch's ``invoke_subgraph``. AOTAutograd, the partitioner and
Inductor then process the subgraph once. Parameters are arguments of a call, and gradients are
results of the call's backward: gathers and reductions stay in the graph around the calls.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.graph.calls import calls_by_region
from deepcompile_zero3.graph.writes import CALLS, writes, written_storages
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.blocks import IsBlock, blocks_around
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.region_facts import RegionFacts, mark_region
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.torch_internals import compiler, effects, is_transformed, tree_leaves

_OPERATORS = (torch_internals.OpOverload, torch_internals.HigherOrderOperator)
# Functions beside those of torch.linalg that raise for some matrices.
_MAY_CHECK_MATRICES = ("cholesky", "inverse", "matrix_power", "pinverse")


@dataclass(frozen=True)
class _Segment:
    """The operations of one block.

    Attributes:
        nodes: its nodes, in the order of the graph.
        inputs: nodes outside that it reads, in the order of their first use.
        outputs: its nodes that others read.
        signature: equal for blocks that compute the same thing from inputs of the same kind.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    signature: Any


def outline(
    gm: fx.GraphModule,
    parameters: Mapping[fx.Node, ParameterFacts],
    is_block: IsBlock,
    options: Options,
) -> dict[str, RegionFacts]:
    """Outlines the equal blocks of Dynamo's graph, if options allow it. Returns facts of each."""
    if options.regions is False or (options.regions is None and not options.inductor):
        return {}
    if options.fp32_weight_grads:  # it looks at what computes a gradient
        return {}
    if options.inductor and compiler.makes_cpp_wrapper(options.inductor_config):
        return {}
    if compiler.has_memory_budget(gm):  # torch cannot tell what a call costs
        return {}
    return outline_regions(gm, parameters, is_block)


def outline_regions(
    gm: fx.GraphModule,
    parameters: Mapping[fx.Node, ParameterFacts],
    is_block: IsBlock,
) -> dict[str, RegionFacts]:
    """Replaces the operations of equal blocks in a lifted graph by calls of one subgraph.

    Blocks stay as they are if no other block is equal, if their operations are interleaved with
    others, if something writes to what they read or compute, if they return a view of what they
    read, or if a result of theirs has no gradient.

    Args:
        gm: Dynamo's graph, after ``lift_unshards``.
        parameters: the graph's inputs that are parameters.
        is_block: whether modules of a class are blocks.

    Returns:
        The facts of each region's parameters, keyed by the name of the region.
    """
    regions: dict[str, RegionFacts] = {}
    marked = len(calls_by_region(gm))  # by the user
    blocks_by_class = list(_blocks(gm.graph, is_block))
    if not blocks_by_class:
        return regions
    written, differentiated = written_storages(gm.graph), _differentiated(gm)
    outlined: set[fx.Node] = set()
    for cls, blocks in blocks_by_class:
        twins: dict[Any, list[_Segment]] = {}
        for nodes in blocks:
            if outlined.isdisjoint(nodes):
                segment = _segment(gm, nodes, written, differentiated, parameters)
                if segment is not None:
                    twins.setdefault(segment.signature, []).append(segment)
        several = [segments for segments in twins.values() if len(segments) > 1]
        names = [
            f"{cls.__name__}_{marked + len(regions) + number}" for number in range(len(several))
        ]
        for name, segments in zip(names, several, strict=True):
            inputs = enumerate(segments[0].inputs)
            regions[name] = {i: parameters[node] for i, node in inputs if node in parameters}
            gm.add_submodule(name, _region(gm, name, segments[0]))
        replaced: dict[fx.Node, fx.Node] = {}  # results of blocks, by what calls return
        for name, segments in zip(names, several, strict=True):
            for segment in segments:
                _call(gm.graph, name, segment, replaced)
                outlined.update(segment.nodes)
    gm.graph.lint()
    gm.recompile()
    return regions


def _blocks(graph: fx.Graph, is_block: IsBlock) -> Iterator[tuple[type, list[list[fx.Node]]]]:
    """Yields each class of blocks, with the nodes of each block. Outer classes come first."""
    found: dict[tuple[int, type], dict[str, list[fx.Node]]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        for depth, (name, cls) in enumerate(blocks_around(node, is_block)):
            found.setdefault((depth, cls), {}).setdefault(name, []).append(node)
    for (_, cls), blocks in sorted(found.items(), key=lambda item: item[0][0]):
        yield cls, list(blocks.values())


def _segment(
    gm: fx.GraphModule,
    nodes: list[fx.Node],
    written: Set[int],
    differentiated: Set[fx.Node],
    parameters: Mapping[fx.Node, ParameterFacts],
) -> _Segment | None:
    """Returns the operations of a block, or None if a call cannot replace them."""
    mine = set(nodes)
    inputs = list(dict.fromkeys(i for node in nodes for i in node.all_input_nodes if i not in mine))
    outputs = [node for node in nodes if any(user not in mine for user in node.users)]
    read = [value for node in inputs if isinstance(value := _value(node), torch.Tensor)]
    results = [value for node in outputs if isinstance(value := _value(node), torch.Tensor)]
    if not outputs or len(results) < len(outputs) or any(map(is_transformed, (*read, *results))):
        return None
    storages = [torch_internals.storage_address(value) for value in results]
    sources = {torch_internals.storage_address(value) for value in read}
    if len({*storages, *sources}) < len(storages) + len(sources):
        return None  # a result is a view of an input or of another result
    if not written.isdisjoint({*storages, *sources}) or any(map(writes, nodes)):
        return None
    # A call gives all of its results a gradient, which may be zero, and so all of its parameters.
    lost = [
        node
        for node, value in zip(outputs, results, strict=True)
        if (value.is_floating_point() or value.is_complex()) and node not in differentiated
    ]
    if lost and torch.is_grad_enabled() and any(value.requires_grad for value in read):
        return None
    users = [user for node in outputs for user in node.users if user not in mine]
    if any(user < nodes[-1] for user in users) or not _is_alone(nodes, mine):
        return None
    numbers = {node: f"%{number}" for number, node in enumerate([*inputs, *nodes])}
    kinds = []
    for node in inputs:
        facts = parameters.get(node)
        if facts is not None and facts.declares_grad_dtype:
            return None  # autograd would cast gradients to the parameter's dtype in a region
        if facts is not None and facts.is_substitute:
            return None  # metadata may be an input too: see ``Pipeline.metadata``
        if not isinstance(_value(node), torch.Tensor | torch.SymInt | int):
            return None
        alike = facts and replace(facts, fqn="", process_group=0, uses=(0,), model_nbytes=0)
        kinds.append((_kind(_value(node)), alike))
    signature = _signature(gm, nodes, numbers)
    if signature is None or any(kind is None for kind, _ in kinds):
        return None
    returned = tuple(numbers[node] for node in outputs)
    return _Segment(nodes, inputs, outputs, (*kinds, signature, returned))


def _is_alone(nodes: Sequence[fx.Node], mine: Set[fx.Node]) -> bool:
    """Returns whether no mode, such as autocast, begins or ends among ``nodes`` or around them."""
    node = nodes[0]
    while node is not nodes[-1]:
        if node not in mine and _value(node) is None and node.op != "get_attr":
            return False
        node = node.next
    opened, closed = (
        sum(mode < nodes[0] for mode in node.graph.find_nodes(op="call_function", target=target))
        for target in (compiler.enter_autocast, compiler.exit_autocast)
    )
    return opened == closed


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _differentiated(gm: fx.GraphModule) -> set[fx.Node]:
    """Returns the nodes that get a gradient when the graph's results do."""
    found: set[fx.Node] = set()
    pending = gm.graph.output_node().all_input_nodes
    while pending:
        node = pending.pop()
        leaves = tree_leaves(_value(node))
        has_gradient = any(isinstance(v, torch.Tensor) and v.requires_grad for v in leaves)
        if has_gradient and node not in found:
            found.add(node)
            pending += _differentiated_inputs(gm, node)
    return found


def _differentiated_inputs(gm: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    first: Any = node.args[0] if node.args else None
    is_call = isinstance(node.target, torch_internals.HigherOrderOperator)
    # Operators with lists of arguments may run their bodies several times.
    if not is_call or any(isinstance(each, list | tuple) for each in node.args):
        return node.all_input_nodes
    if not isinstance(first, fx.Node) or first.op != "get_attr":
        return node.all_input_nodes
    body = getattr(gm, str(first.target))
    inside = _differentiated(body)
    inputs = body.graph.find_nodes(op="placeholder")
    arguments: Any = node.args[len(node.args) - len(inputs) :]
    return [each for each, input in zip(arguments, inputs, strict=True) if input in inside]


def _signature(
    gm: fx.GraphModule, nodes: Sequence[fx.Node], numbers: Mapping[fx.Node, str]
) -> tuple | None:
    """Returns a key of what ``nodes`` compute, or None if they cannot be moved into a region."""
    parts: list[Any] = []
    part: Any
    for node in nodes:
        arguments = map_aggregate(
            (node.args, node.kwargs), lambda a: _Name(numbers[a]) if isinstance(a, fx.Node) else a
        )
        # A weight that the whole graph returns is gathered by a node of its own.
        if node.target in (compiler.invoke_subgraph, ops.unshard.default) or _has_effects(node):
            return None
        if node.op == "get_attr":
            nested = getattr(gm, str(node.target), None)
            if not isinstance(nested, fx.GraphModule) or any(map(writes, nested.graph.nodes)):
                return None
            inner = list(nested.graph.nodes)
            names = {each: f"%{number}" for number, each in enumerate(inner)}
            body = _signature(nested, inner, names)
            # A selective checkpoint keeps its policy here.
            policy = repr(nested.meta.get("_checkpoint_context_fn"))
            part = None if body is None else (body, policy)
        else:
            kind = "" if node.op == "output" else _kind(_value(node))
            target = node.target if node.op in CALLS else node.op
            annotation = repr(node.meta.get("custom"))
            part = None if kind is None else (target, repr(arguments), kind, annotation)
        if part is None:
            return None
        parts.append(part)
    return tuple(parts)


def _has_effects(node: fx.Node) -> bool:
    """Returns whether ``node`` prints, or raises for some values of matrices.

    torch keeps such effects in order by a token, and computes no gradient of a region with one.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "print":
        return True
    is_operator = isinstance(node.target, _OPERATORS)
    if not (is_operator or name.startswith("linalg_") or name in _MAY_CHECK_MATRICES):
        return False
    args, kwargs = map_arg((node.args, node.kwargs), _value)
    if is_operator:
        return effects.has_effects(node.target, args, kwargs)
    function: Any = getattr(torch.Tensor, name) if node.op == "call_method" else node.target
    return effects.calls_effects(function, args, kwargs)


class _Name(str):
    """The name of a node in a signature."""

    __slots__ = ()
    __repr__ = str.__str__


def _kind(value: Any) -> str | None:
    """Returns what a compiler may assume of ``value``, as text; None if no region can have it."""
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            return None  # the backward may get a conjugate view, for which torch calls no region
        stride = value.stride() if value.layout is torch.strided else None
        return f"{value.dtype} {value.device} {tuple(value.shape)} {stride} {value.requires_grad}"
    if isinstance(value, tuple | list):
        kinds = [_kind(item) for item in value]
        return None if None in kinds else f"({', '.join(map(str, kinds))})"
    if isinstance(value, torch.SymInt) and compiler.free_unbacked_symbols(value):
        return None
    return repr(value) if isinstance(value, int | torch.SymInt | torch.Size) else None


def _region(gm: fx.GraphModule, name: str, segment: _Segment) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(segment.inputs):
        copies[node] = graph.placeholder(f"arg_{position}")
        copies[node].meta["example_value"] = _value(node)
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in segment.outputs))
    region = fx.GraphModule(gm, graph)
    mark_region(region, name)
    return region


def _call(graph: fx.Graph, name: str, segment: _Segment, replaced: dict[fx.Node, fx.Node]) -> None:
    """Replaces a block by a call of its region."""
    with graph.inserting_after(segment.nodes[-1]):
        attribute = graph.get_attr(name)
    with graph.inserting_after(attribute):
        arguments = (replaced.get(node, node) for node in segment.inputs)
        after = call = graph.call_function(compiler.invoke_subgraph, (attribute, name, *arguments))
    call.meta = segment.nodes[-1].meta | {"example_value": tuple(map(_value, segment.outputs))}
    for position, node in enumerate(segment.outputs):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (call, position))
        after.meta = dict(node.meta)
        node.replace_all_uses_with(after)
        replaced[node] = after
    for node in reversed(segment.nodes):
        graph.erase_node(node)
