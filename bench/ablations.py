"""Variants of zero3, most of them ``zero3-c10d-twice`` without one optimization.

Each patch applies only to processes of ranks that train in its mode.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import fx
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from bench.modes import Mode, Step, zero3
from bench.workloads import Workload
from deepcompile_zero3 import limit_buffers
from deepcompile_zero3.passes import pipeline, reduce
from deepcompile_zero3.runtime import ops


def _without_products() -> None:
    reduce._LARGE = sys.maxsize


def _without_prefetch() -> None:
    insert = pipeline.insert_gathers

    def insert_late(gm: fx.GraphModule, *args: object) -> None:
        insert(gm, *args)  # type: ignore[arg-type]
        for wait in gm.graph.find_nodes(op="call_function", target=ops.all_gather_wait.default):
            wait.args = wait.args[:2]
            wait.prepend(wait.args[0])
        gm.recompile()

    pipeline.insert_gathers = insert_late  # type: ignore[assignment]


def _marked(workload: Workload) -> Step:
    for cls in (LlamaDecoderLayer, Qwen3MoeDecoderLayer):
        cls.forward = torch.compiler.nested_compile_region(cls.forward)  # type: ignore[method-assign]
    return zero3(workload)


_twice = partial(zero3, transport="c10d", reshard_after_forward=True)


def _build(workload: Workload, *, remove: Callable[[], None]) -> Step:
    remove()
    return _twice(workload)


ABLATIONS = {
    "without-regions": Mode(
        "zero3, each of several equal blocks compiled", partial(zero3, options={"regions": False})
    ),
    "zero3-local": Mode("zero3, with step_locally", partial(zero3, steps_locally=True)),
    "zero3-marked": Mode("zero3, blocks marked by nested_compile_region", _marked),
    "without-pool": Mode(
        "zero3-c10d-twice, every buffer allocated anew",
        partial(_build, remove=partial(limit_buffers, 0)),
    ),
    "without-products": Mode(
        "zero3-c10d-twice, gradients are copied to where they are sent from",
        partial(_build, remove=_without_products),
    ),
    "without-prefetch": Mode(
        "zero3-c10d-twice, a gather starts when it is waited for",
        partial(_build, remove=_without_prefetch),
    ),
    "gather-fp8": Mode(
        "zero3-c10d-twice, gathering in float8_e4m3fn",
        partial(_twice, options={"gather_dtype": torch.float8_e4m3fn}),
    ),
    "reduce-int8": Mode(
        "zero3-c10d-twice, gradients travel in int8", partial(_twice, gradient_dtype=torch.int8)
    ),
    "fp8-int8": Mode(
        "zero3-c10d-twice, both",
        partial(
            _twice,
            options={"gather_dtype": torch.float8_e4m3fn},
            gradient_dtype=torch.int8,
        ),
    ),
    "gather-8": Mode(
        "zero3-c10d-twice, gathering 8 MiB at a time",
        partial(_twice, options={"gather_bucket_mb": 8.0}),
    ),
    "reduce-8": Mode(
        "zero3-c10d-twice, reducing 8 MiB at a time", partial(_twice, reduce_bucket_mb=8)
    ),
}
