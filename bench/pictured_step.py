"""Trains workload A by messages, for a picture of one step:

torchrun --nproc-per-node 2 -m deepcompile_zero3 trace --skip 4 --steps 5 --json build/step.json \
    bench/pictured_step.py
python bench/draw_step.py build/step.json docs/images/overlap.svg
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.workloads import WORKLOADS
from deepcompile_zero3 import fully_shard


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = WORKLOADS["A"]
    model = workload.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, transport="c10d")
    fully_shard(model, mesh=mesh, transport="c10d")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = torch.compile(model, backend="zero3", options={"gather_bucket_mb": 16, "keep_mb": 0})
    torch.manual_seed(1 + dist.get_rank())
    text = torch.randint(workload.vocabulary, (workload.batch, workload.sequence))
    for _ in range(9):
        step(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
