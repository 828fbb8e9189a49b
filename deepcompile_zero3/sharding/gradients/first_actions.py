"""The first action of a backward that reaches an output of a sharded model: it announces presences.

Ranks tell each other which gradients the backward will bring. Otherwise the first gather or
gradient of the model would announce them: too late on a rank that runs an inner backward before it.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.autograd import graph

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.parameter import ShardedParameter

_HANDLES = "zero3_handles"  # key of a node's metadata: a parameter of each model to announce


def announce_at(nodes: Iterable[graph.Node], parameters: Iterable[ShardedParameter]) -> None:
    """Makes a backward that reaches one of ``nodes`` announce the models of ``parameters``.

    A node announces a model once, even if several forwards return its output.
    """
    one_of_each = {each.handle.model_number: each.handle for each in parameters}
    for node in nodes:
        metadata: dict[str, Any] = node.metadata  # type: ignore[assignment]
        handles = metadata.get(_HANDLES)
        if handles is None:
            handles = metadata[_HANDLES] = {}  # by number of the model
            node.register_prehook(functools.partial(_announce, handles))
        handles.update(one_of_each)


def nodes_of(outputs: Iterable[Any]) -> set[graph.Node]:
    """Returns the autograd nodes that produce ``outputs``."""
    nodes = (output.grad_fn for output in outputs if isinstance(output, torch.Tensor))
    return {node for node in nodes if node is not None}


@torch_internals.disable_dynamo  # compiled autograd would trace it
def _announce(handles: Mapping[int, _C.Parameter], _: Any) -> None:
    _C.announce_presences([*handles.values()])
