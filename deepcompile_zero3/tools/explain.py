"""``explain``: reports how a sharded model is compiled, before a step is taken."""

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.backend import zero3
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.alias import base_of, views_of
from deepcompile_zero3.graph.capture import CapturedGraph, CapturedGraphs, capture_graphs
from deepcompile_zero3.graph.metadata import COMMENT, fqns_of
from deepcompile_zero3.graph.peak import gathered_items
from deepcompile_zero3.graph.size import nbytes_of, nbytes_of_tensor
from deepcompile_zero3.graph.text import short_name
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.pipeline import saved_outputs
from deepcompile_zero3.passes.reduce import ReductionComment
from deepcompile_zero3.runtime import REDUCTIONS, WAITS, ops
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.registered import all_parameters_of
from deepcompile_zero3.sharding.swap import original_class
from deepcompile_zero3.tools.planning.machine import Machine, machine_of
from deepcompile_zero3.tools.planning.simulate import simulate
from deepcompile_zero3.tools.report import GatherBucket, Gradient, Graph, Report
from deepcompile_zero3.tools.timeline import Timeline
from deepcompile_zero3.torch_internals import compiler


def explain(
    model: nn.Module,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    machine: Machine | str = "h100",
    **kwargs: Any,
) -> Report:
    """Compiles a call of a sharded model and reports what its graphs gather, keep and reduce.

    The function is collective: it calls the model once, and the call gathers parameters. Nothing
    is trained: no backward runs, and buffers and the state of torch's random number generators are
    restored. Code that the user has compiled, or compiles later, is not affected.

    Args:
        model: a sharded model, compiled or not.
        args: positional arguments of the call. The report holds for a batch of this size.
        options: the options of ``torch.compile(model, backend="zero3", options=...)``.
        machine: the machine that the report's timeline is predicted for, with AdamW's state in
            fp32. Bytes and collectives are the same on every machine.
        kwargs: keyword arguments of the call.

    Returns:
        The :class:`Report` of a step.

    Raises:
        Zero3Error: nothing in ``model`` is sharded, or no graph was compiled.
        TypeError: ``model`` is not a module.
        ValueError: an option or the machine is unknown. Exceptions of the model are passed on.

    Example::

        fully_shard(model)
        print(explain(model, input_ids=text, labels=text))
    """
    machine = machine_of(machine)
    Options.parse(options)  # raises here, where no compiler wraps the error
    model = getattr(model, "_orig_mod", model)  # the module of torch.compile(model)
    parameters = all_parameters_of(model, "explain")
    with (
        capture_graphs() as graphs,
        compiler.graph_breaks() as breaks,
        without_a_trace(model, parameters),
    ):
        backend = functools.partial(zero3, options=options)
        compiler.call_compiled_apart(model, backend, args, kwargs)
    if not graphs.forward:
        raise Zero3Error(
            "explain has nothing to say: no graph was compiled. Is torch.compile disabled, as by "
            "TORCHDYNAMO_DISABLE=1, or the whole call?"
        )
    step = simulate(graphs, {parameter.fqn: parameter for parameter in parameters}, machine)
    return report_of(model, parameters, graphs, tuple(breaks), step.timeline)


def report_of(
    model: nn.Module,
    parameters: Sequence[ShardedParameter],
    graphs: CapturedGraphs,
    breaks: tuple[str, ...],
    timeline: Timeline,
) -> Report:
    """Returns the report of a model whose graphs were captured."""
    described = [_describe("forward", graph) for graph in graphs.forward]
    described += [_describe("backward", graph) for graph in graphs.backward]
    buckets = [bucket for graph in described for bucket in graph.gathers]
    gathered = {name for bucket in buckets for name in bucket.parameters}
    placeholders = [parameter.placeholder for parameter in parameters]
    shards = [torch_internals.local_tensor(parameter.shard) for parameter in parameters]
    return Report(
        model=original_class(model).__name__,
        world_size=max(parameter.handle.world_size for parameter in parameters),
        is_shared=all(not parameter.handle.can.sends_messages for parameter in parameters),
        parameters=len(parameters),
        nbytes=sum(map(nbytes_of_tensor, placeholders)),
        shards=sum(map(nbytes_of_tensor, shards)),
        graphs=tuple(described),
        breaks=breaks,
        in_eager=tuple(p.fqn for p in parameters if p.fqn not in gathered),
        timeline=timeline,
    )


@contextlib.contextmanager
def without_a_trace(model: nn.Module, parameters: Sequence[ShardedParameter]) -> Iterator[None]:
    """Restores, after the block, buffers and random state, which a compiled forward changes."""
    buffers = [
        (owner, name, buffer, torch_internals.version_of(buffer), buffer.detach().clone())
        for owner in model.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    devices = {p.handle.device.index for p in parameters if p.handle.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)), torch.enable_grad():
        try:
            yield
        finally:
            for owner, name, buffer, version, before in buffers:
                setattr(owner, name, buffer)
                if torch_internals.version_of(buffer) != version:
                    with torch.no_grad():
                        buffer.copy_(before)


def _describe(direction: str, captured: CapturedGraph) -> Graph:
    graph = captured.inlined.graph
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
        )


def _gradients(graph: fx.Graph) -> Iterator[Gradient]:
    for node in graph.nodes:
        if node.target not in REDUCTIONS:
            continue
        dtypes: ReductionComment = node.meta[COMMENT]
        yield Gradient(
            parameter=fqns_of(node)[0],
            raw=short_name(dtypes.raw),
            leaf="any" if dtypes.leaf is None else short_name(dtypes.leaf),
            wire=short_name(dtypes.wire),
            nbytes=dtypes.numel * dtypes.wire.itemsize,
            is_copied=node.target is ops.reduce_grad.default,
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
    """Returns what a forward saves, without inputs and parameters: a node for each storage."""
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
