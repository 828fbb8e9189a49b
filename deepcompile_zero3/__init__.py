"""ZeRO-3 as a compiler pass.

fully_shard(model)                                   # DTensor shards, as FSDP2 users know them
step = torch.compile(model, backend="zero3")         # one graph; collectives are nodes in it
"""

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from deepcompile_zero3.backend import Options, zero3
from deepcompile_zero3.capture import CapturedGraph, CapturedGraphs, capture_graphs
from deepcompile_zero3.checks import detect_nonfinite, gradient_norms
from deepcompile_zero3.defer import defer_reduction, deposit_grad
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.explain import explain
from deepcompile_zero3.fully_shard import fully_shard
from deepcompile_zero3.module import Zero3Module, register_fsdp_forward_method
from deepcompile_zero3.planning.machine import MACHINES, Link, Machine
from deepcompile_zero3.planning.plan import Plan, plan, shard_blocks
from deepcompile_zero3.report import Report
from deepcompile_zero3.runtime import (
    BufferStats,
    Collective,
    CollectiveLog,
    buffer_stats,
    limit_buffers,
    record_collectives,
    release_buffers,
)

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
