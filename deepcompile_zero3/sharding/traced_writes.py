"""Writes to gathered parameters in code that a compiler traces."""

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
            parameter = parameter_of(torch_internals.traced_input(node.args[0]))
            raise Zero3Error(
                f"'{parameter.fqn if parameter else node.args[0]}' is modified in place inside of "
                "a compiled forward, where it is a temporary copy that is freed: modify the "
                "parameter outside of forward"
            )
