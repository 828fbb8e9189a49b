"""Modes of training a workload: each mode builds a function that takes one step.

A step is forward, backward, an optimizer step (fused AdamW) and clearing the gradients.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import deepcompile_zero3
from bench.workloads import Workload
from deepcompile_zero3.sharding.module_parameters import parameters_of

Step = Callable[[torch.Tensor], torch.Tensor]  # returns the loss, which is not awaited


@dataclass(frozen=True)
class Mode:
    about: str
    build: Callable[[Workload], Step]


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _step(run: Callable, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _built(workload: Workload) -> nn.Module:
    model = workload.build()
    return model if workload.param_dtype is None else model.to(workload.param_dtype)


def _floor(workload: Workload, *, writes_back: bool = False) -> Step:
    """Runs the whole model, and AdamW over this rank's part of each tensor, without communication.

    If ``writes_back``, the updated parts are cast and written to the model, as by a gather. A
    single rank trains in this way: a model in ``param_dtype``, and AdamW over its fp32 copy.
    """
    model = _built(workload)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    parts = {
        parameter: nn.Parameter(parameter.detach().chunk(world_size)[rank].float().clone())
        for parameter in model.parameters()
    }
    optimizer = adamw(parts.values())
    own = [parameter.detach().chunk(world_size)[rank] for parameter in parts]
    run = torch.compile(model)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for parameter, part in parts.items():
            part.grad = parameter.grad.chunk(world_size)[rank].to(part.dtype)
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if writes_back:
            torch._foreach_copy_(own, [part.detach() for part in parts.values()])
        return loss.detach()

    return step


def sharded(
    workload: Workload, fully_shard: Callable, *, replicas: int = 1, **settings: Any
) -> nn.Module:
    """Shards each block, and the rest with the root, as in FSDP2's documentation."""
    model = workload.build()
    ranks = dist.get_world_size() // replicas
    shape: tuple[int, ...] = (ranks,)
    names: tuple[str, ...] = ("shard",)
    if replicas > 1:
        shape, names = (replicas, ranks), ("replicate", "shard")
    settings |= {
        "mesh": init_device_mesh(workload.device, shape, mesh_dim_names=names),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=workload.param_dtype, reduce_dtype=workload.reduce_dtype
        ),
    }
    for block in model.model.layers:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def zero3(
    workload: Workload,
    *,
    compiled: str = "model",
    options: dict[str, Any] | None = None,
    reduce_bucket_mb: float | None = None,
    steps_locally: bool = False,
    gradient_dtype: torch.dtype | None = None,
    measures: bool = False,
    **settings: Any,
) -> Step:
    """Trains with zero3; ``options`` go to the backend, ``settings`` to ``fully_shard``.

    If it ``measures``, the first call takes steps until a schedule is chosen.
    """
    model = sharded(workload, deepcompile_zero3.fully_shard, **settings)
    if gradient_dtype is not None:
        deepcompile_zero3.quantize_gradients(model, gradient_dtype)
    if reduce_bucket_mb is not None:
        for module in model.modules():
            for parameter in parameters_of(module).values():
                nbytes = int(reduce_bucket_mb * 2**20)
                parameter.settings = parameter.settings.replace(bucket_bytes=nbytes)
    optimizer = adamw(model.parameters())
    if steps_locally:
        deepcompile_zero3.step_locally(optimizer)
    schedule = deepcompile_zero3.MeasuredSchedule(model) if measures else None
    step = _step(_compiled(model, compiled, backend="zero3", options=options), optimizer)
    return step if schedule is None else _scheduled(step, schedule)


def _scheduled(step: Step, schedule: deepcompile_zero3.MeasuredSchedule) -> Step:
    def settled(tokens: torch.Tensor) -> torch.Tensor:
        while not schedule.is_settled:
            step(tokens)
            schedule.step()
            if schedule.is_settled and dist.get_rank() == 0:
                print(schedule, file=sys.stderr)
        return step(tokens)

    return settled


def _compiled(model: nn.Module, what: str, **settings: Any) -> nn.Module:
    """Returns the model to call, compiled as ``what`` says: "model", its "blocks" or "no"."""
    if what == "blocks":
        for block in model.model.layers:
            block.compile(**settings)
    return torch.compile(model, **settings) if what == "model" else model


def _fsdp2(workload: Workload, *, compiled: str, **settings: Any) -> Step:
    model = sharded(workload, fsdp2, **settings)
    return _step(_compiled(model, compiled), adamw(model.parameters()))


def _ddp(workload: Workload, *, compiled: bool) -> Step:
    """Trains with DDP in the compute dtype, on the wire too."""
    replicated = DistributedDataParallel(_built(workload))
    run = torch.compile(replicated) if compiled else replicated
    return _step(run, adamw(replicated.parameters()))


class _Whole(nn.Module):
    """A parametrization: a DTensor parameter is read whole, and its gradient is summed."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._forward_dtype = workload.param_dtype
        self._backward_dtype = workload.reduce_dtype

    def forward(self, shard: DTensor) -> torch.Tensor:
        whole = shard.redistribute(
            placements=[Replicate()],
            forward_dtype=self._forward_dtype,
            backward_dtype=self._backward_dtype,
        )
        return whole.to_local(grad_placements=[Partial("sum")])


def _properties(workload: Workload) -> Step:
    """Shards by properties over DTensor's collectives and compiles the whole model (SimpleFSDP).

    Gloo cannot average, so gradients are sums, which take as long.
    """
    model = workload.build()
    mesh = init_device_mesh(workload.device, (dist.get_world_size(),))
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            module.register_parameter(name, shard)
            nn.utils.parametrize.register_parametrization(
                module, name, _Whole(workload), unsafe=True
            )
    return _step(torch.compile(model), adamw(model.parameters()))


def _deepspeed(workload: Workload) -> Step:
    """Trains with DeepSpeed, whose engine averages gradients, takes their norm and clears them.

    DeepSpeed's default sizes are for far larger models; they would keep these models whole from
    forward to backward. Here all parameters are sharded, the parameters of a block are prefetched
    or reduced together, and as many parameters may be alive as in FSDP2: the root's and those of
    two blocks.
    """
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # otherwise DeepSpeed compiles a collective for inference
    model = workload.build()
    layers = model.model.layers
    block = sum(parameter.numel() for parameter in layers[0].parameters())
    root = sum(parameter.numel() for parameter in model.parameters()) - len(layers) * block
    config = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "bf16": {"enabled": workload.param_dtype == torch.bfloat16},
        "communication_data_type": "bf16" if workload.reduce_dtype == torch.bfloat16 else "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": block,
            "stage3_prefetch_bucket_size": block,
            "stage3_max_live_parameters": root + 2 * block,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config=config,
        dist_init_required=False,
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of collectives
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return step


MODES = {
    "floor": Mode("compiled, nothing communicated", _floor),
    "zero3": Mode("ours, compiled, as it comes", zero3),
    "zero3-again": Mode(
        "ours, compiled, all gathered again in backward, in bounded memory",
        partial(zero3, reshard_after_forward=True),
    ),
    "zero3-blocks": Mode("ours, each block compiled", partial(zero3, compiled="blocks")),
    "zero3-blocks-again": Mode(
        "ours, each block compiled, all gathered again in backward",
        partial(zero3, compiled="blocks", reshard_after_forward=True),
    ),
    "zero3-eager": Mode("ours, eager", partial(zero3, compiled="no")),
    "zero3-c10d": Mode(
        "ours, compiled, by messages in place of shared memory", partial(zero3, transport="c10d")
    ),
    "zero3-c10d-blocks": Mode(
        "ours, each block compiled, by messages",
        partial(zero3, compiled="blocks", transport="c10d"),
    ),
    "zero3-c10d-measured": Mode(
        "ours, compiled, by messages, with a schedule from measured steps",
        partial(zero3, transport="c10d", measures=True),
    ),
    "zero3-c10d-twice": Mode(
        "ours, compiled, by messages, all gathered again in backward",
        partial(zero3, transport="c10d", reshard_after_forward=True),
    ),
    "zero3-c10d-keep": Mode(
        "ours, compiled, by messages, all kept from forward to backward",
        partial(zero3, transport="c10d", reshard_after_forward=False),
    ),
    "fsdp2-blocks": Mode("FSDP2, each block compiled", partial(_fsdp2, compiled="blocks")),
    "fsdp2-model": Mode("FSDP2, whole model compiled", partial(_fsdp2, compiled="model")),
    "fsdp2-eager": Mode("FSDP2, eager", partial(_fsdp2, compiled="no")),
    "ddp": Mode("DDP, compiled; nothing sharded", partial(_ddp, compiled=True)),
    "ddp-eager": Mode("DDP, eager; nothing sharded", partial(_ddp, compiled=False)),
    "properties": Mode("DTensor properties, compiled (SimpleFSDP's idea)", _properties),
}
if find_spec("deepspeed"):
    MODES["deepspeed"] = Mode(
        "DeepSpeed ZeRO-3, eager; bf16: shards in bf16, fp32 copies in the optimizer", _deepspeed
    )

# On a GPU only: on a CPU they would be others once more.
ON_GPU = {
    "plain": Mode(
        "compiled, nothing sharded; bf16: a model in bf16, AdamW over its fp32 copy",
        partial(_floor, writes_back=True),
    ),
    **{
        f"zero3-activations-{gib}": Mode(
            f"ours, compiled; of the activations, {gib} GiB stay on the GPU",
            partial(zero3, options={"activations_mb": gib * 1024}),
        )
        for gib in (8, 16)
    },
    "zero3-offload": Mode(
        "ours, compiled; shards, gradients and AdamW on the CPU",
        partial(zero3, offload_policy=CPUOffloadPolicy()),
    ),
    "fsdp2-offload": Mode(
        "FSDP2, each block compiled; shards, gradients and AdamW on the CPU",
        partial(_fsdp2, compiled="blocks", offload_policy=CPUOffloadPolicy()),
    ),
}

HOSTS = 2  # of bench/hosts.py

OVER_HOSTS = {
    "floor": MODES["floor"],
    "hybrid": Mode(
        "ours: shards within a host, optimizer over all ranks",
        partial(zero3, replicas=HOSTS, shard_optimizer_over_replicas=True),
    ),
    "hsdp": Mode("ours: shards within a host, replicas", partial(zero3, replicas=HOSTS)),
    "flat": Mode("ours: shards over all ranks", partial(zero3, transport="c10d")),
    "fsdp2-hsdp": Mode(
        "FSDP2's blocks: shards within a host, replicas",
        partial(_fsdp2, compiled="blocks", replicas=HOSTS),
    ),
    "fsdp2-flat": Mode("FSDP2's blocks: shards over all ranks", partial(_fsdp2, compiled="blocks")),
    "ddp": MODES["ddp"],
}
