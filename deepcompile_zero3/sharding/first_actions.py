"""What a backward does first, when it reaches an output of a sharded model.

Ranks then tell each other which gradients the backward will bring. Without this, the first gather
or gradient of the model would do so: too late for a rank whose backward runs another one before.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import graph

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.parameter import ShardedParameter


def announce_at(nodes: Iterable[graph.Node], parameters: Iterable[ShardedParameter]) -> None:
    """Makes a backward that reaches one of ``nodes`` announce the models of ``parameters``."""
    one_of_each = {parameter.model: parameter.handle for parameter in parameters}
    announce = functools.partial(_announce, [*one_of_each.values()])
    for node in nodes:
        node.register_prehook(announce)


def nodes_of(outputs: Iterable[Any]) -> set[graph.Node]:
    """Returns the autograd nodes that produce ``outputs``."""
    nodes = (output.grad_fn for output in outputs if isinstance(output, torch.Tensor))
    return {node for node in nodes if node is not None}


@torch_internals.disable_dynamo  # compiled autograd would trace it
def _announce(handles: Sequence[_C.Parameter], _: Any) -> None:
    _C.announce_presences(handles)
