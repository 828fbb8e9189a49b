"""Steps as they are predicted, beside steps as they are."""

import json
import os
import statistics
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.ranks import Ranks
from bench.workloads import WORKLOADS, Workload
from deepcompile_zero3.backend import Options
from deepcompile_zero3.planning.calibrate import measure_machine
from deepcompile_zero3.planning.graphs import fake_ranks, trace
from deepcompile_zero3.planning.kernels import kernels_of
from deepcompile_zero3.planning.measure import measure_kernels
from deepcompile_zero3.planning.plan import Plan, plan, shard_blocks

MODE = "zero3-c10d"


def predict(workload: str, ranks: int) -> Plan:
    """A plan for this machine, after all ranks at once have measured it and the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_calibrate, (workload, ranks, folder), ranks)
        machine = torch.load(f"{folder}/machine", weights_only=False)
        seconds = json.loads(Path(f"{folder}/kernels").read_text())
    shape = WORKLOADS[workload]
    return plan(
        shape.build,
        _call(shape),
        world_size=ranks,
        machine=machine,
        shard=partial(_shard, shape),
        seconds_by_kernel=seconds,
    )


def _call(shape: Workload) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(shape.batch, shape.sequence, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def _shard(shape: Workload, model: torch.nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=shape.param_dtype, reduce_dtype=shape.reduce_dtype)
    shard_blocks(model, mesh, mp_policy=policy)


def _calibrate(rank: int, workload: str, ranks: int, folder: str) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCHINDUCTOR_CACHE_DIR=f"{folder}/cache-{rank}")
    torch.set_num_threads(1)
    shape = WORKLOADS[workload]
    with fake_ranks(ranks) as mesh:
        with torch.device("meta"):
            model = shape.build()
        _shard(shape, model, mesh)
        graphs = trace(model, _call(shape)).rewrite(Options())
    kernels = [
        kernel
        for captured in (*graphs.forward, *graphs.backward)
        for kernel in kernels_of(captured.graph_module.graph)
    ]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=10),
    )
    seconds = measure_kernels(kernels, between=dist.barrier)
    machine = measure_machine(init_device_mesh("cpu", (ranks,)))
    everyones = [None] * ranks
    dist.all_gather_object(everyones, seconds)
    if rank == 0:
        torch.save(machine, f"{folder}/machine")
        slowest = {key: max(each[key] for each in everyones) for key in seconds}
        Path(f"{folder}/kernels").write_text(json.dumps(slowest))
    dist.destroy_process_group()


def measure(workload: str, ranks: int, rounds: int) -> dict[str, Any]:
    """Medians of steps, a step's collectives, and memory: at rest, and at most."""
    with tempfile.TemporaryDirectory() as cache:
        running = Ranks(workload, MODE, ranks, cache)
        try:
            for _ in range(3):
                running.call("step")
            collectives = running.call("collectives")[0]
            resting = running.call("memory")
            costs = [running.call("step") for _ in range(rounds)]
            memory = running.call("memory")
        finally:
            running.close()
    return {
        "seconds": statistics.median(max(cost.wall for cost in step) for step in costs),
        "collectives": {op: tuple(counted) for op, counted in collectives.items()},
        "rest": max(each.resident for each in resting),
        "peak": max(each.peak for each in memory),
    }


def compare(workloads: list[str], all_ranks: list[int], rounds: int) -> None:
    """Prints a line for each workload and number of ranks.

    A process has memory that no plan knows of: Python, torch, compiled code. It is what is resident
    between steps beyond the shards and the optimizer's state.
    """
    print("| workload | ranks | step, ms | predicted | off | sent | peak, MB | predicted | off |")
    print("| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    for ranks in all_ranks:
        for workload in workloads:
            found, told = measure(workload, ranks, rounds), predict(workload, ranks)
            sent = {op: (t.number, t.nbytes) for op, t in told.traffic.items()}
            base = found["rest"] - told.memory["shards"] - told.memory["optimizer"]
            peak = base + told.peak
            cells = (
                workload,
                ranks,
                f"{found['seconds'] * 1e3:.0f}",
                f"{told.seconds * 1e3:.0f}",
                f"{told.seconds / found['seconds'] - 1:+.0%}",
                "as planned" if sent == found["collectives"] else f"{found['collectives']}, {sent}",
                f"{found['peak'] / 1e6:.0f}",
                f"{peak / 1e6:.0f}",
                f"{peak / found['peak'] - 1:+.0%}",
            )
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
