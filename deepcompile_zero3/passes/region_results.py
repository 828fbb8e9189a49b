"""Changes which tensors regions return, once a joint graph is partitioned."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from deepcompile_zero3.graph.alias import base_of, is_view, untransposed
from deepcompile_zero3.graph.calls import arguments_of, calls_by_region, region_named, results_of
from deepcompile_zero3.torch_internals import compiler


def separate_results(gm: fx.GraphModule) -> None:
    """Makes regions return tensors that share no memory, with each other or with arguments.

    Inductor expects each result of a call to own its memory, and reuses the memory after the last
    use. So the graph around a region makes the views that the region returned, of results or
    arguments. In particular, it saves an argument itself and not a result of the region, and sees
    whether the argument is a parameter.
    """
    for name, calls in calls_by_region(gm).items():
        region = region_named(gm, name)
        inputs = _positions_of_inputs(region)
        replays = {
            position: _replay(result)
            for position, result in enumerate(results_in(region))
            if result is not None
        }
        bases = dict.fromkeys(base for replay in replays.values() for base in replay.bases)
        results: list[fx.Node | None] = [base for base in bases if base not in inputs]
        for call in calls:
            for position, item in results_of(call):
                _compute_behind(call, item, replays[position], inputs, results)
        return_from(region, results, calls)
    gm.graph.lint()
    gm.recompile()


def move_products_out(gm: fx.GraphModule, gradients: Iterable[int]) -> None:
    """Moves matrix products that are gradients from regions to behind their calls.

    A region returns the operands. The reduction can then compute the product in the memory that the
    gradient is sent from.

    Args:
        gm: a backward graph.
        gradients: positions of parameters' gradients in its output.
    """
    outputs = results_in(gm)
    sent = (outputs[position] for position in gradients)
    gradient_nodes = {untransposed(node) for node in sent if node is not None}
    for name, calls in calls_by_region(gm).items():
        region = region_named(gm, name)
        results = results_in(region)
        products = {}
        for position, item in (result for call in calls for result in results_of(call)):
            product = results[position]
            is_product = product.target is torch.ops.aten.mm.default and len(product.users) == 1
            if item in gradient_nodes and is_product:
                products[position] = _replay_all(product.all_input_nodes).then(product)
        if not products:
            continue
        inputs = _positions_of_inputs(region)
        results = [None if i in products else result for i, result in enumerate(results)]
        for base in (base for product in products.values() for base in product.bases):
            if base not in inputs and base not in results:
                results.append(base)
        for call in calls:
            for position, item in results_of(call):
                if position in products:
                    _compute_behind(call, item, products[position], inputs, results)
        return_from(region, results, calls)


def keep_strides_of_regions(gm: fx.GraphModule) -> None:
    """Makes Inductor keep the strides of regions' results, and of the arguments that are saved.

    All calls of a region, also in backward, then get tensors of the same strides.
    """
    arguments = set()
    for name, calls in calls_by_region(gm).items():
        region = region_named(gm, name)
        compiler.keep_strides(region.graph, range(len(results_in(region))))
        given = (argument for call in calls for argument in arguments_of(call))
        arguments |= {base_of(each) for each in given if isinstance(each, fx.Node)}
    saved = (
        i
        for i, r in enumerate(results_in(gm))
        if isinstance(r, fx.Node) and base_of(r) in arguments
    )
    compiler.keep_strides(gm.graph, saved)


@dataclass(frozen=True)
class _Replay:
    """Recipe to compute a node of a region outside of it.

    Attributes:
        bases: inputs of the region, or nodes that own their memory.
        nodes: nodes to compute from them, in order; the last is the node in question.
    """

    bases: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...] = ()

    def then(self, node: fx.Node) -> "_Replay":
        """Returns how to compute ``node`` from what this computes."""
        return _Replay(self.bases, (*self.nodes, node))


def _replay(node: fx.Node) -> _Replay:
    """Returns how to compute a view, or a size, from the nodes that own memory."""
    is_size = isinstance(node.meta.get("val"), torch.SymInt)
    if node.target is operator.getitem and not is_view(node.all_input_nodes[0]):
        return _Replay((node,))
    if node.op == "placeholder" or not (is_size or is_view(node)):
        return _Replay((node,))
    operands = _replay_all(node.all_input_nodes)
    if is_size and any(base.op != "placeholder" for base in operands.bases):
        return _Replay((node,))
    return operands.then(node)


def _replay_all(nodes: Iterable[fx.Node]) -> _Replay:
    """Returns how to compute all of ``nodes``."""
    replays = [_replay(node) for node in nodes]
    return _Replay(
        tuple(dict.fromkeys(base for replay in replays for base in replay.bases)),
        tuple(dict.fromkeys(node for replay in replays for node in replay.nodes)),
    )


def _compute_behind(
    call: fx.Node,
    item: fx.Node,
    replay: _Replay,
    inputs: Mapping[fx.Node, int],
    results: list[fx.Node | None],
) -> None:
    """Computes ``item``, a former result of ``call``, from the present ones."""
    graph = call.graph
    outside: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(item):
        for base in replay.bases:
            if base in inputs:
                outside[base] = arguments_of(call)[inputs[base]]
            else:
                outside[base] = graph.call_function(operator.getitem, (call, results.index(base)))
                outside[base].meta = {"val": base.meta["val"]}
        for node in replay.nodes:
            outside[node] = graph.node_copy(node, outside.__getitem__)
            # Inductor finds tensors that share memory by the storages of these values. A product
            # has its own, as the result that it takes the place of: tracing it again takes longer.
            owns = node is replay.nodes[-1] and not is_view(node)
            value = item.meta["val"] if owns else value_of(outside[node])
            outside[node].meta = {"val": value}
    item.replace_all_uses_with(outside[(*replay.bases, *replay.nodes)[-1]])
    graph.erase_node(item)


def value_of(node: fx.Node) -> Any:
    """Returns the value that tracing would record for ``node``, from its arguments' values."""
    target: Any = node.target
    args, kwargs = map_aggregate(
        (node.args, node.kwargs), lambda a: a.meta["val"] if isinstance(a, fx.Node) else a
    )
    return target(*args, **kwargs)


def _positions_of_inputs(region: fx.GraphModule) -> dict[fx.Node, int]:
    inputs = region.graph.find_nodes(op="placeholder")
    return {node: position for position, node in enumerate(inputs)}


def results_in(gm: fx.GraphModule) -> list[Any]:
    """Returns the results of a graph: nodes, or None."""
    results: Any = gm.graph.output_node().args[0]
    return list(results)


def return_from(region: fx.GraphModule, results: list[Any], calls: Iterable[fx.Node]) -> None:
    """Makes a region return ``results``, and removes nodes that these do not need."""
    compiler.set_results(region.graph, results)
    region.graph.output_node().meta.pop("desc", None)
    region.graph.eliminate_dead_code()
    region.recompile()
    for call in calls:
        call.meta["val"] = tuple(None if r is None else r.meta["val"] for r in results)
