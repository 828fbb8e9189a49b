"""Calls of a region that torch does not check again.

Before torch differentiates a call of ``invoke_subgraph``, it traces the region to see whether the
region writes to an argument, for each call, and in both of AOTAutograd's traces of a graph. The
function that it then calls is stored by the region's name, and takes every call of that name. So
the check of the first call stands for all.
"""

from typing import Any

import torch
from torch import fx

from deepcompile_zero3.graph.calls import calls_by_region
from deepcompile_zero3.torch_internals import compiler


def check_regions_once(gm: fx.GraphModule) -> bool:
    """Makes torch check each region of Dynamo's graph at its first call only.

    AOTAutograd's joint graph is the same as without.

    Returns:
        Whether a region is called twice, so that the graph calls :func:`call_again`.
    """
    again = [call for calls in calls_by_region(gm).values() for call in calls[1:]]
    for call in again:
        call.target = call_again
    if again:
        gm.recompile()  # caches find the graph by its code
    return bool(again)


def call_again(region: fx.GraphModule, name: str, *operands: Any) -> Any:
    """Calls a region of that name, which an earlier call has checked.

    A tracer sees no more of this function than what it calls.
    """
    tensors = (each for each in operands if isinstance(each, torch.Tensor))
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        differentiable = compiler.differentiable_region(name)
        if differentiable is not None:
            return differentiable(*operands)
    return compiler.invoke_subgraph(region, name, *operands)
