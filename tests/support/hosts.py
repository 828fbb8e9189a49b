"""Ranks that train over two hosts, which are network namespaces of this machine."""

import os
import sys
from datetime import timedelta

import torch.distributed as dist
from support.paths import ROOT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

sys.path.append(str(ROOT))  # the last: an installed package comes before the source tree

from bench.link import FIRST_ADDRESS, enter


class Place:
    """Where a rank of a pool is to train. It ends the pool's job, which is over the loopback.

    Attributes:
        rank, world_size: the rank of the new job, and the number of ranks.
        host: the namespace of this rank. Each has half of the ranks.
        pids: of the ranks' processes, by rank.
    """

    def __init__(self, hosts):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.host = hosts[self.rank * len(hosts) // self.world_size]
        self.pids = [None] * self.world_size
        dist.all_gather_object(self.pids, os.getpid())
        dist.barrier()
        dist.destroy_process_group()

    @property
    def pids_of_last_host(self):
        return self.pids[self.world_size // 2 :]

    def join(self, seconds):
        """Begins a job over the link, with such a timeout. Its store is on the first host."""
        enter(self.host)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{FIRST_ADDRESS}:29500",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=seconds),
        )

    def settings_of(self, layout, seconds):
        """Returns arguments of ``fully_shard``, on a mesh whose groups have such a timeout.

        Args:
            layout: "flat": all ranks have a shard; "replicas": each host has the model; "parts":
                likewise, and hosts have a part of each shard to step.
            seconds: the timeout.
        """
        if layout == "flat":
            mesh = init_device_mesh("cpu", (self.world_size,))
        else:
            mesh = init_device_mesh("cpu", (2, self.world_size // 2))
        for group in mesh.get_all_groups():
            _set_pg_timeout(timedelta(seconds=seconds), group)
        settings = {"mesh": mesh}
        if layout == "flat":  # the hosts have one memory
            settings["transport"] = "c10d"
        if layout == "parts":
            settings["shard_optimizer_over_replicas"] = True
        return settings
