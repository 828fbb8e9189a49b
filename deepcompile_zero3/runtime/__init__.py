"""Python interface of the C++ runtime."""

from deepcompile_zero3.runtime.buffers import (
    BufferStats,
    buffer_stats,
    limit_buffers,
    release_buffers,
)
from deepcompile_zero3.runtime.collective_log import Collective, CollectiveLog, record_collectives
from deepcompile_zero3.runtime.load import _C
from deepcompile_zero3.runtime.operators import LOADS, REDUCTIONS, STORES, WAITS, ops
