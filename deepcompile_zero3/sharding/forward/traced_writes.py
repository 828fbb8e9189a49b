"""Writes to parameters, gathered or sharded, in code that a compiler traces."""

from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.writes import storages_of, written_storages
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.sharding.parameter import ShardedParameter, parameter_of
from deepcompile_zero3.torch_internals import dynamo_trace


def refuse_traced_writes(gm: fx.GraphModule) -> None:
    """Raises Zero3Error if a graph of Dynamo's writes to a gathered parameter.

    Backends make graphs functional, and the write would be lost without a trace.
    """
    for nested in (each for each in gm.modules() if isinstance(each, fx.GraphModule)):
        for node in nested.graph.find_nodes(op="call_function", target=ops.unshard.default):
            full = node.meta.get("example_value")
            if not isinstance(full, torch.Tensor) or not torch_internals.version_of(full):
                continue
            parameter = parameter_of(_traced_with(gm, node.args[0]))
            raise Zero3Error(
                f"'{parameter.fqn if parameter else node.args[0]}' is modified in place in "
                "compiled code, where it is a gathered copy that is freed: modify the parameter "
                "outside of forward, while it is sharded"
            )


def end_graph_if_changed(parameter: ShardedParameter) -> None:
    """Makes Dynamo end its graph ahead of a read if the graph has changed the shard before.

    A graph gathers what is registered when it runs: the parameter as it was before the graph.
    Dynamo applies what it has traced, such as another registered shard (``functional_call``) or a
    write to this one, after the graph. Once the graph has ended, the rest sees the change.
    """
    is_replaced = any(map(dynamo_trace.is_changed_in_trace, parameter.registered.registries()))
    if is_replaced or _is_written(dynamo_trace.traced_graph(), parameter):
        dynamo_trace.refuse_to_be_traced(
            f"a read of '{parameter.fqn}' behind a change of it, which its gather would not see,"
        )


def _is_written(graph: fx.Graph, parameter: ShardedParameter) -> bool:
    """Returns whether a graph that is being traced writes to the shard of ``parameter``."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if (
            isinstance(value, DTensor)
            and dynamo_trace.traced_input(node) is parameter.registered.latest
        ):
            return not storages_of(value).isdisjoint(written_storages(graph))
    return False


def _traced_with(gm: fx.GraphModule, placeholder: Any) -> object:
    """Returns the value that an input of a graph, or of a subgraph in it, was traced with.

    A subgraph, of a checkpoint say, has inputs of its own, which have the values of the graph's.
    """
    value = placeholder.meta.get("example_value")
    for given in gm.graph.find_nodes(op="placeholder"):
        if value is not None and given.meta.get("example_value") is value:
            return dynamo_trace.traced_input(given)
    return None
