"""ZeRO-3 as a compiler pass.

fully_shard(model)                                   # DTensor shards, as FSDP2 users know them
step = torch.compile(model, backend="zero3")         # one graph; collectives are nodes in it
"""

import importlib
from typing import TYPE_CHECKING, Any

from deepcompile_zero3 import torch_release  # noqa: F401  (it warns of a torch that was not tried)
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import (
    BufferStats,
    Collective,
    CollectiveLog,
    buffer_stats,
    limit_buffers,
    record_collectives,
    release_buffers,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    from deepcompile_zero3.backend import Options, zero3
    from deepcompile_zero3.capture import CapturedGraph, CapturedGraphs, capture_graphs
    from deepcompile_zero3.checks import detect_nonfinite, gradient_norms
    from deepcompile_zero3.defer import defer_reduction, deposit_grad
    from deepcompile_zero3.module import Zero3Module, register_fsdp_forward_method
    from deepcompile_zero3.planning.machine import MACHINES, Link, Machine
    from deepcompile_zero3.planning.plan import Plan, plan, shard_blocks
    from deepcompile_zero3.report import Report
    from deepcompile_zero3.sharding.fully_shard import fully_shard
    from deepcompile_zero3.tools.explain import explain

__version__ = "0.1.0"

__all__ = [
    "BufferStats",
    "CapturedGraph",
    "CapturedGraphs",
    "Collective",
    "CollectiveLog",
    "MACHINES",
    "Link",
    "Machine",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Options",
    "Plan",
    "Report",
    "Zero3Error",
    "Zero3Module",
    "buffer_stats",
    "capture_graphs",
    "defer_reduction",
    "deposit_grad",
    "detect_nonfinite",
    "explain",
    "fully_shard",
    "gradient_norms",
    "limit_buffers",
    "plan",
    "record_collectives",
    "register_fsdp_forward_method",
    "release_buffers",
    "shard_blocks",
    "zero3",
]

# The modules of the public names that are imported at first use: DTensor takes half a second to
# load, and torch's compiler two. No module of this package itself has such a name.
_LATER = {
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "Options": "deepcompile_zero3.backend",
    "zero3": "deepcompile_zero3.backend",
    "CapturedGraph": "deepcompile_zero3.capture",
    "CapturedGraphs": "deepcompile_zero3.capture",
    "capture_graphs": "deepcompile_zero3.capture",
    "detect_nonfinite": "deepcompile_zero3.checks",
    "gradient_norms": "deepcompile_zero3.checks",
    "defer_reduction": "deepcompile_zero3.defer",
    "deposit_grad": "deepcompile_zero3.defer",
    "Zero3Module": "deepcompile_zero3.module",
    "register_fsdp_forward_method": "deepcompile_zero3.module",
    "MACHINES": "deepcompile_zero3.planning.machine",
    "Link": "deepcompile_zero3.planning.machine",
    "Machine": "deepcompile_zero3.planning.machine",
    "Plan": "deepcompile_zero3.planning.plan",
    "plan": "deepcompile_zero3.planning.plan",
    "shard_blocks": "deepcompile_zero3.planning.plan",
    "Report": "deepcompile_zero3.report",
    "fully_shard": "deepcompile_zero3.sharding.fully_shard",
    "explain": "deepcompile_zero3.tools.explain",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
