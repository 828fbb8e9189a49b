"""What a plan assumes of the ranks' hardware."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Link:
    """Between a rank and the others, or between hosts: time = latency + bytes / bandwidth.

    Attributes:
        latency: seconds of each step of a ring.
        bandwidth: bytes/s that a rank receives, as reached.
    """

    latency: float
    bandwidth: float


_NOT_COMPARED = "not compared with a measured step yet"


@dataclass(frozen=True)
class Machine:
    """Of one rank's device, and how it reaches others.

    Attributes:
        name: of it.
        flops: FLOP/s of large matrix products by dtype, as reached and not as advertised.
        bandwidth: of its memory, bytes/s read and written, as reached by copies.
        update_bandwidth: the same of an optimizer, which writes what it has read.
        launch: seconds that each kernel takes at least.
        memory: bytes.
        ranks_per_host: so many ranks reach each other by ``local``, others by ``remote``.
        local, remote: the links. Each rank of a host has its part of what leaves the host.
        overlap: the share of a collective that runs beside computation; the rest stops it.
        backend: of c10d, "nccl" or "gloo"; they need different buffers.
        source: of the numbers.
        compared: how far plans for it were off.
    """

    name: str
    flops: dict[torch.dtype, float]
    bandwidth: float
    update_bandwidth: float
    launch: float
    memory: float
    ranks_per_host: int
    local: Link
    remote: Link
    overlap: float = 1.0
    backend: str = "nccl"
    source: str = field(default="", compare=False)
    compared: str = field(default=_NOT_COMPARED, compare=False)

    def __post_init__(self) -> None:
        if torch.float32 not in self.flops:
            raise ValueError("flops of a machine have at least torch.float32")
        numbers = {f"flops of {dtype}": value for dtype, value in self.flops.items()}
        numbers |= {name: getattr(self, name) for name in _NUMBERS}
        for link in ("local", "remote"):
            numbers[f"{link}_bandwidth"] = getattr(self, link).bandwidth
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"'{name}' of a machine is a positive number, got {value!r}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"'overlap' of a machine is from 0 to 1, got {self.overlap!r}")
        if self.ranks_per_host < 1 or self.ranks_per_host != int(self.ranks_per_host):
            raise ValueError(
                f"'ranks_per_host' of a machine is a number of ranks, got {self.ranks_per_host!r}"
            )

    @property
    def provenance(self) -> str:
        """Where its numbers come from, and how far they lead."""
        return f"{self.name}: {self.source or 'numbers of your own'}; {self.compared}"

    def with_numbers(self, **numbers: float) -> "Machine":
        """Another one, with some numbers of one's own.

        Args:
            numbers: attributes by name; ``local_bandwidth``, ``local_latency``,
                ``remote_bandwidth`` and ``remote_latency``; ``flops`` is of all dtypes.

        Raises:
            ValueError: there is no such number, or it makes no sense.
        """
        machine = self
        changed: dict[str, Any]
        for name, value in numbers.items():
            link, _, number = name.partition("_")
            if name == "flops":
                machine = replace(machine, flops=dict.fromkeys(machine.flops, value))
            elif name in ("ranks_per_host", "overlap", *_NUMBERS):
                changed = {name: value}
                machine = replace(machine, **changed)
            elif link in ("local", "remote") and number in ("bandwidth", "latency"):
                changed = {link: replace(getattr(machine, link), **{number: value})}
                machine = replace(machine, **changed)
            else:
                known = ("flops", "ranks_per_host", "overlap", *_NUMBERS, *_LINK_NUMBERS)
                raise ValueError(f"a machine has no '{name}'; it has {', '.join(known)}")
        if not numbers:
            return machine
        told = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
        source = f"{machine.source}; by you: {told}".removeprefix("; ")
        return replace(machine, source=source, compared=_NOT_COMPARED)

    def flops_of(self, dtype: torch.dtype) -> float:
        """FLOP/s of products in ``dtype``; of fp32 if it is not known."""
        return self.flops.get(dtype, self.flops[torch.float32])

    def seconds_of_kernel(self, flops: float, dtype: torch.dtype, nbytes: float) -> float:
        """By the roofline."""
        return self.launch + max(flops / self.flops_of(dtype), nbytes / self.bandwidth)

    def bytes_over_links(self, op: str, nbytes: int, ranks: "Ranks") -> tuple[float, float]:
        """What a rank receives of ranks of its host, and what it receives of others.

        Args:
            op: "all_gather", "reduce_scatter" or "all_reduce".
            nbytes: of the full buffer.
            ranks: that take part.
        """
        both_ways = 2 if op == "all_reduce" else 1
        whole = both_ways * nbytes
        fewest = ranks.number - ranks.on_host * (ranks.hosts - 1)  # on the last host
        remote = whole * (1 - fewest / ranks.number) / fewest  # ranks of a host share it out
        return whole * (ranks.number - 1) / ranks.number - remote, remote

    def seconds_of_collective(self, op: str, nbytes: int, ranks: "Ranks") -> float:
        """The links work side by side, and the steps of a ring one after the other."""
        local, remote = self.bytes_over_links(op, nbytes, ranks)
        steps = 2 if op == "all_reduce" else 1
        latency = self.local.latency * (ranks.on_host - 1) * ranks.hosts
        latency += self.remote.latency * (ranks.hosts - 1)
        moving = max(local / self.local.bandwidth, remote / self.remote.bandwidth)
        return self.launch + steps * latency + moving


@dataclass(frozen=True)
class Ranks:
    """Those of a collective.

    Attributes:
        number: of them.
        on_host: of them on each host.
    """

    number: int
    on_host: int

    @property
    def hosts(self) -> int:
        """How many hosts they are on."""
        return -(-self.number // self.on_host)


_NUMBERS = ("bandwidth", "update_bandwidth", "launch", "memory")
_LINK_NUMBERS = ("local_bandwidth", "local_latency", "remote_bandwidth", "remote_latency")


def machine_of(machine: Machine | str) -> Machine:
    """The machine, or the one of :data:`MACHINES` of this name.

    Raises:
        ValueError: there is none.
    """
    if isinstance(machine, Machine):
        return machine
    if machine not in MACHINES:
        raise ValueError(f"machine is a Machine or one of {', '.join(MACHINES)}, got {machine!r}")
    return MACHINES[machine]


# Of what is advertised, what a well-made program reaches; override it by what you measure.
_OF_FLOPS, _OF_BANDWIDTH, _OF_LINK = 0.7, 0.85, 0.8


def _gpu(
    name: str,
    *,
    low: float,
    fp32: float,
    terabytes: float,
    gigabytes: float,
    nvlink: float,
    nic: float,
    source: str,
) -> Machine:
    """From data sheets: TFLOP/s without sparsity, TB/s, GB, and GB/s in one direction."""
    low_flops = low * 1e12 * _OF_FLOPS
    flops = dict.fromkeys((torch.bfloat16, torch.float16), low_flops)
    return Machine(
        name=name,
        flops=flops | {torch.float32: fp32 * 1e12 * _OF_FLOPS},
        bandwidth=terabytes * 1e12 * _OF_BANDWIDTH,
        update_bandwidth=terabytes * 1e12 * _OF_BANDWIDTH,
        launch=5e-6,
        memory=gigabytes * 1e9,
        ranks_per_host=8,
        local=Link(1e-6, nvlink * 1e9 * _OF_LINK),
        remote=Link(5e-6, nic * 1e9 * _OF_LINK),
        source=source,
    )


MACHINES = {
    machine.name: machine
    for machine in (
        _gpu(
            "a100",
            low=312,
            fp32=19.5,
            terabytes=2.039,
            gigabytes=80,
            nvlink=300,
            nic=25,
            source="NVIDIA A100 80GB SXM data sheet; a 200 Gb/s adapter a GPU, as DGX A100 has",
        ),
        _gpu(
            "h100",
            low=989,
            fp32=67,
            terabytes=3.35,
            gigabytes=80,
            nvlink=450,
            nic=50,
            source="NVIDIA H100 SXM data sheet; a 400 Gb/s adapter a GPU, as DGX H100 has",
        ),
        _gpu(
            "h200",
            low=989,
            fp32=67,
            terabytes=4.8,
            gigabytes=141,
            nvlink=450,
            nic=50,
            source="NVIDIA H200 SXM data sheet; a 400 Gb/s adapter a GPU, as DGX H200 has",
        ),
        _gpu(
            "b200",
            low=2250,
            fp32=75,
            terabytes=7.7,
            gigabytes=180,
            nvlink=900,
            nic=50,
            source="NVIDIA HGX B200 data sheet, a GPU's part; a 400 Gb/s adapter a GPU",
        ),
    )
}
