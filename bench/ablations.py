"""Ours, gathering twice, without one of its optimisations: what each is worth.

Patches are made in the process of a rank, which trains in this mode only.
"""

import sys
from collections.abc import Callable
from functools import partial

from torch import fx

from bench.modes import Mode, Step, zero3
from bench.workloads import Workload
from deepcompile_zero3 import backend, limit_buffers
from deepcompile_zero3.passes import reduce
from deepcompile_zero3.runtime import ops


def _without_pool() -> None:
    limit_buffers(0)


def _without_products() -> None:
    reduce._LARGE = sys.maxsize


def _without_prefetch() -> None:
    insert = backend.insert_gathers

    def insert_late(gm: fx.GraphModule, *args: object) -> None:
        insert(gm, *args)  # type: ignore[arg-type]
        for wait in gm.graph.find_nodes(op="call_function", target=ops.all_gather_wait.default):
            wait.args = wait.args[:2]
            wait.prepend(wait.args[0])
        gm.recompile()

    backend.insert_gathers = insert_late  # type: ignore[assignment]


def _build(workload: Workload, *, remove: Callable[[], None]) -> Step:
    remove()
    return zero3(workload, reshard_after_forward=True)


def _resized(workload: Workload, *, gather_mb: float = 64, reduce_mb: float = 64) -> Step:
    return zero3(
        workload,
        options={"gather_bucket_mb": gather_mb},
        reduce_bucket_mb=reduce_mb,
        reshard_after_forward=True,
    )


ABLATIONS = {
    "without-pool": Mode(
        "zero3-twice, every buffer allocated anew", partial(_build, remove=_without_pool)
    ),
    "without-products": Mode(
        "zero3-twice, gradients are copied to where they are sent from",
        partial(_build, remove=_without_products),
    ),
    "without-prefetch": Mode(
        "zero3-twice, a gather starts when it is waited for",
        partial(_build, remove=_without_prefetch),
    ),
    "gather-8": Mode("zero3-twice, gathering 8 MiB at a time", partial(_resized, gather_mb=8)),
    "reduce-8": Mode("zero3-twice, reducing 8 MiB at a time", partial(_resized, reduce_mb=8)),
}
