"""Writes to gathered parameters in code that a compiler traces."""

from typing import Any

import torch
from torch import fx

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import ops
from deepcompile_zero3.sharding.parameter import parameter_of


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


def _traced_with(gm: fx.GraphModule, placeholder: Any) -> object:
    """Returns the value that an input of a graph, or of a subgraph in it, was traced with.

    A subgraph, of a checkpoint say, has inputs of its own, which have the values of the graph's.
    """
    value = placeholder.meta.get("example_value")
    for given in gm.graph.find_nodes(op="placeholder"):
        if value is not None and given.meta.get("example_value") is value:
            return torch_internals.traced_input(given)
    return None
