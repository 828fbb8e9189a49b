"""Counts the collectives of a step, and their bytes, by kind."""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from deepcompile_zero3 import record_collectives

_GATHERS = {
    "c10d::_allgather_base_",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::all_gather_into_tensor_out",
}
_REDUCE_SCATTERS = {"c10d::_reduce_scatter_base_", "_c10d_functional::reduce_scatter_tensor"}
_ITEM_SIZES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8}


def count(step: Callable[[], object]) -> dict[str, tuple[int, int]]:
    """Returns, by kind, how many collectives ``step`` issues and the bytes of their full buffers.

    The runtime records the collectives of this library. For other libraries, the profiler records
    c10d operators; the all-reduce inside gloo's reduce-scatter is not counted again.
    """
    number: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    with record_collectives() as ours:
        step()
    for collective in ours:
        number[collective.op] += 1
        nbytes[collective.op] += collective.nbytes
    if number:
        return {kind: (number[kind], nbytes[kind]) for kind in number}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    for event in profiler.profiler.kineto_results.events():
        sizes = [
            _ITEM_SIZES.get(dtype, 0) * torch.Size(shape).numel()
            for dtype, shape in zip(event.dtypes(), event.shapes(), strict=True)
            if not shape or isinstance(shape[0], int)
        ]
        largest = max(sizes, default=0)
        if event.name() in _GATHERS:
            functional = event.name().startswith("_c10d_functional")
            number["all_gather"] += 1
            nbytes["all_gather"] += largest * (dist.get_world_size() if functional else 1)
        elif event.name() in _REDUCE_SCATTERS:
            for kind, sign in (("reduce_scatter", 1), ("all_reduce", -1)):
                number[kind] += sign
                nbytes[kind] += sign * largest
        elif event.name() == "gloo:all_reduce":
            number["all_reduce"] += 1
            nbytes["all_reduce"] += largest
    return {kind: (number[kind], nbytes[kind]) for kind in number if number[kind] > 0}
