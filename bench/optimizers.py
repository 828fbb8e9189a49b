"""Times ``optimizer.step()`` of Muon: on owners, on shards that are gathered, on all ranks."""

import os
import time
from collections.abc import Iterable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from deepcompile_zero3 import MatrixOwners, fully_shard

WIDTH, INNER, LAYERS = 512, 1408, 4


class _Layer(nn.Module):
    """The matrices of a layer of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.attention:
            x = linear(x)
        return self.down(self.up[0](x) * self.up[1](x))


def _sharded(has_owners: bool) -> Iterable[nn.Parameter]:
    model = nn.Sequential(*(_Layer() for _ in range(LAYERS)))
    owners = MatrixOwners(model) if has_owners else None
    for layer in model:
        fully_shard(layer, shard_placement_fn=owners)
    fully_shard(model, shard_placement_fn=owners)
    (model(torch.randn(4, WIDTH)) - 1).square().mean().backward()
    return model.parameters()


def _plain() -> Iterable[nn.Parameter]:
    model = nn.Sequential(*(_Layer() for _ in range(LAYERS)))
    (model(torch.randn(4, WIDTH)) - 1).square().mean().backward()
    return model.parameters()


def run(rank: int, world_size: int, store: str, rounds: int, results: list) -> None:
    """Runs a rank's process; rank 0 appends a row for each way to step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    ways = {
        "Muon, one rank owns each matrix": torch.optim.Muon(_sharded(has_owners=True)),
        "Muon, shards are gathered": torch.optim.Muon(_sharded(has_owners=False)),
        "Muon, every rank updates all (DDP)": torch.optim.Muon(_plain()),
        "AdamW on shards": torch.optim.AdamW(_sharded(has_owners=False)),
    }
    collectives = {}
    for name, optimizer in ways.items():
        with CommDebugMode() as counted:
            optimizer.step()
        collectives[name] = counted.get_total_counts()
    walls: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, optimizer in ways.items():
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            slowest = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            walls[name].append(slowest.item())
    if rank == 0:
        results += [(name, median(walls[name]), collectives[name]) for name in ways]
    dist.destroy_process_group()
