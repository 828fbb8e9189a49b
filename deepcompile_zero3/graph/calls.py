"""Finds the subgraphs that a graph calls: regions, compiled once for all calls, and others."""

import copy
from collections.abc import Iterator
from typing import Any

from torch import fx

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.torch_internals import compiler


def calls_by_region(gm: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """Returns the calls of each region in a graph, keyed by the name of the region's module."""
    result: dict[str, list[fx.Node]] = {}
    for call in gm.graph.find_nodes(op="call_function", target=compiler.invoke_subgraph):
        result.setdefault(called_by(call), []).append(call)
    return result


def called_by(call: fx.Node) -> str:
    """Returns the name of the region that ``call`` calls."""
    attribute: Any = call.args[0]
    return attribute.target


def region_named(gm: fx.GraphModule, name: str) -> fx.GraphModule:
    """Returns the region of that name."""
    region: Any = gm.get_submodule(name)
    return region


def arguments_of(call: fx.Node) -> list[Any]:
    """Returns the arguments of a call, in the order of the region's inputs."""
    return list(call.args[2:])


def results_of(call: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """Yields the position and node of each result of a call that something uses."""
    for item in list(call.users):
        position: Any = item.args[1]
        yield position, item


def graph_modules(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Returns ``gm`` and all graphs nested in it."""
    return [module for module in gm.modules() if isinstance(module, fx.GraphModule)]


def bodies_of(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graphs that a node of ``gm`` calls, if it is a higher-order operator."""
    if not isinstance(node.target, torch_internals.HigherOrderOperator):
        return []
    attributes = (each for each in node.all_input_nodes if each.op == "get_attr")
    bodies: Any = [getattr(gm, str(each.target), None) for each in attributes]
    return [body for body in bodies if isinstance(body, fx.GraphModule)]


def inputs_of(body: fx.GraphModule, call: fx.Node, argument: fx.Node) -> list[fx.Node]:
    """Returns the inputs of ``body`` that get ``argument``. They are the call's last arguments."""
    inputs = body.graph.find_nodes(op="placeholder")
    arguments = call.args[max(len(call.args) - len(inputs), 0) :]
    return [each for each, a in zip(inputs, arguments, strict=False) if a is argument]


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph and of the graphs that it calls, which shares all tensors."""
    result = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for name, child in list(result.named_children()):
        if isinstance(child, fx.GraphModule):
            result.add_module(name, copied(child))
    return result


def inlined(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph with the nodes of its regions in place of their calls."""
    result = copied(gm)
    graph = result.graph
    for name, calls in calls_by_region(result).items():
        region = inlined(region_named(result, name)).graph
        inputs = region.find_nodes(op="placeholder")
        for call in calls:
            with graph.inserting_before(call):
                outputs: Any = graph.graph_copy(
                    region, dict(zip(inputs, arguments_of(call), strict=True))
                )
            for position, item in results_of(call):
                item.replace_all_uses_with(outputs[position])
                graph.erase_node(item)
            graph.erase_node(call)
        for attribute in graph.find_nodes(op="get_attr", target=name):
            graph.erase_node(attribute)
    result.recompile()
    return result
