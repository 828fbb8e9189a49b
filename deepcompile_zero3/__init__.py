"""ZeRO-3 as a compiler pass.

fully_shard(model)                                   # DTensor shards, as FSDP2 users know them
step = torch.compile(model, backend="zero3")         # one graph; collectives are nodes in it
"""

import importlib
from typing import TYPE_CHECKING, Any

from deepcompile_zero3 import (
    source_key,  # noqa: F401  (reads the sources as they are now)
    torch_release,  # noqa: F401  (warns of an untried torch)
)
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

    from deepcompile_zero3.backend import zero3
    from deepcompile_zero3.features.checks.nonfinite import detect_nonfinite
    from deepcompile_zero3.features.checks.norms import gradient_norms
    from deepcompile_zero3.features.digests.digest_log import DigestLog
    from deepcompile_zero3.features.digests.training_digest import (
        TrainingDigest,
        training_digest,
    )
    from deepcompile_zero3.features.offload.file_policy import FileOffloadPolicy, OffloadStats
    from deepcompile_zero3.features.optimizer_steps.local_step import step_locally
    from deepcompile_zero3.features.optimizer_steps.offload_optimizer import offload_optimizer
    from deepcompile_zero3.features.optimizer_steps.step_in_backward import step_in_backward
    from deepcompile_zero3.features.owned.matrix_owners import MatrixOwners
    from deepcompile_zero3.features.owned.muon import Muon
    from deepcompile_zero3.features.owned.owned import Owned
    from deepcompile_zero3.features.quantized.gradients import quantize_gradients
    from deepcompile_zero3.features.quantized.replica_gathers import quantize_replica_gathers
    from deepcompile_zero3.features.streaming.load import load_safetensors
    from deepcompile_zero3.features.streaming.receiver import (
        SharedMemoryReceiver,
        SharedMemorySender,
    )
    from deepcompile_zero3.features.streaming.save import save_safetensors
    from deepcompile_zero3.features.streaming.stream import stream_full_parameters
    from deepcompile_zero3.features.transformers.shard_in_transformers import shard_in_transformers
    from deepcompile_zero3.fsdp2.functions import (
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from deepcompile_zero3.graph.capture import (
        CapturedGraph,
        CapturedGraphs,
        CapturedPass,
        capture_graphs,
    )
    from deepcompile_zero3.options import Options, Schedule
    from deepcompile_zero3.passes.graph_pass import GraphFacts, GraphPass, graph_pass
    from deepcompile_zero3.sharding.fully_shard import fully_shard
    from deepcompile_zero3.sharding.gradients.clip import clip_grad_norm_
    from deepcompile_zero3.sharding.gradients.defer import defer_reduction, deposit_grad
    from deepcompile_zero3.sharding.module import Zero3Module
    from deepcompile_zero3.tools.explain import explain
    from deepcompile_zero3.tools.planning.ahead import CompiledAhead, compile_ahead
    from deepcompile_zero3.tools.planning.graphs import shard_blocks
    from deepcompile_zero3.tools.planning.machine import MACHINES, Link, Machine
    from deepcompile_zero3.tools.planning.plan import plan
    from deepcompile_zero3.tools.planning.predicted import Plan
    from deepcompile_zero3.tools.report import Report
    from deepcompile_zero3.tools.scheduling.measured_schedule import MeasuredSchedule

__version__ = "0.1.0"

__all__ = [
    "BufferStats",
    "CapturedGraph",
    "CapturedGraphs",
    "CapturedPass",
    "Collective",
    "CollectiveLog",
    "CompiledAhead",
    "DigestLog",
    "FileOffloadPolicy",
    "GraphFacts",
    "GraphPass",
    "MACHINES",
    "Link",
    "Machine",
    "MatrixOwners",
    "MeasuredSchedule",
    "MixedPrecisionPolicy",
    "Muon",
    "OffloadPolicy",
    "OffloadStats",
    "Options",
    "Owned",
    "Plan",
    "Report",
    "Schedule",
    "SharedMemoryReceiver",
    "SharedMemorySender",
    "TrainingDigest",
    "Zero3Error",
    "Zero3Module",
    "buffer_stats",
    "capture_graphs",
    "clip_grad_norm_",
    "compile_ahead",
    "defer_reduction",
    "deposit_grad",
    "detect_nonfinite",
    "explain",
    "fully_shard",
    "gradient_norms",
    "graph_pass",
    "limit_buffers",
    "load_safetensors",
    "offload_optimizer",
    "plan",
    "quantize_gradients",
    "quantize_replica_gathers",
    "record_collectives",
    "register_fsdp_forward_method",
    "release_buffers",
    "save_safetensors",
    "shard_blocks",
    "shard_in_transformers",
    "share_comm_ctx",
    "step_in_backward",
    "step_locally",
    "stream_full_parameters",
    "training_digest",
    "zero3",
]

# Maps public names that are imported at first use to their modules. Importing DTensor takes half a
# second, importing torch's compiler two. No module of this package itself has one of these names.
_LATER = {
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "FileOffloadPolicy": "deepcompile_zero3.features.offload.file_policy",
    "OffloadStats": "deepcompile_zero3.features.offload.file_policy",
    "offload_optimizer": "deepcompile_zero3.features.optimizer_steps.offload_optimizer",
    "Options": "deepcompile_zero3.options",
    "Schedule": "deepcompile_zero3.options",
    "zero3": "deepcompile_zero3.backend",
    "CapturedGraph": "deepcompile_zero3.graph.capture",
    "CapturedGraphs": "deepcompile_zero3.graph.capture",
    "CapturedPass": "deepcompile_zero3.graph.capture",
    "capture_graphs": "deepcompile_zero3.graph.capture",
    "GraphFacts": "deepcompile_zero3.passes.graph_pass",
    "GraphPass": "deepcompile_zero3.passes.graph_pass",
    "graph_pass": "deepcompile_zero3.passes.graph_pass",
    "detect_nonfinite": "deepcompile_zero3.features.checks.nonfinite",
    "gradient_norms": "deepcompile_zero3.features.checks.norms",
    "DigestLog": "deepcompile_zero3.features.digests.digest_log",
    "TrainingDigest": "deepcompile_zero3.features.digests.training_digest",
    "training_digest": "deepcompile_zero3.features.digests.training_digest",
    "clip_grad_norm_": "deepcompile_zero3.sharding.gradients.clip",
    "defer_reduction": "deepcompile_zero3.sharding.gradients.defer",
    "deposit_grad": "deepcompile_zero3.sharding.gradients.defer",
    "Zero3Module": "deepcompile_zero3.sharding.module",
    "step_in_backward": "deepcompile_zero3.features.optimizer_steps.step_in_backward",
    "step_locally": "deepcompile_zero3.features.optimizer_steps.local_step",
    "MatrixOwners": "deepcompile_zero3.features.owned.matrix_owners",
    "Muon": "deepcompile_zero3.features.owned.muon",
    "Owned": "deepcompile_zero3.features.owned.owned",
    "SharedMemoryReceiver": "deepcompile_zero3.features.streaming.receiver",
    "SharedMemorySender": "deepcompile_zero3.features.streaming.receiver",
    "load_safetensors": "deepcompile_zero3.features.streaming.load",
    "save_safetensors": "deepcompile_zero3.features.streaming.save",
    "stream_full_parameters": "deepcompile_zero3.features.streaming.stream",
    "quantize_gradients": "deepcompile_zero3.features.quantized.gradients",
    "quantize_replica_gathers": "deepcompile_zero3.features.quantized.replica_gathers",
    "register_fsdp_forward_method": "deepcompile_zero3.fsdp2.functions",
    "share_comm_ctx": "deepcompile_zero3.fsdp2.functions",
    "CompiledAhead": "deepcompile_zero3.tools.planning.ahead",
    "compile_ahead": "deepcompile_zero3.tools.planning.ahead",
    "MACHINES": "deepcompile_zero3.tools.planning.machine",
    "Link": "deepcompile_zero3.tools.planning.machine",
    "Machine": "deepcompile_zero3.tools.planning.machine",
    "Plan": "deepcompile_zero3.tools.planning.predicted",
    "plan": "deepcompile_zero3.tools.planning.plan",
    "shard_blocks": "deepcompile_zero3.tools.planning.graphs",
    "Report": "deepcompile_zero3.tools.report",
    "MeasuredSchedule": "deepcompile_zero3.tools.scheduling.measured_schedule",
    "fully_shard": "deepcompile_zero3.sharding.fully_shard",
    "shard_in_transformers": "deepcompile_zero3.features.transformers.shard_in_transformers",
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
