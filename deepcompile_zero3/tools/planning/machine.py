"""The hardware that a plan assumes."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Link:
    """A link between ranks of a host, or between hosts: time = latency + bytes / bandwidth.

    Attributes:
        latency: seconds of each step of a ring.
        bandwidth: bytes/s that a rank receives, as reached, not as advertised.
    """

    latency: float
    bandwidth: float


_NOT_COMPARED = "not compared with a measured step yet"


@dataclass(frozen=True)
class Machine:
    """The device of one rank, and its links to other ranks.

    Attributes:
        name: the name of the machine.
        flops: FLOP/s of large matrix products by dtype, as reached, not as advertised. At least
            ``torch.float32`` is required.
        bandwidth: bytes/s of device memory that copies read and write, as reached.
        update_bandwidth: bytes/s of an optimizer, which writes the memory that it has read.
        launch: seconds that each kernel takes at least.
        memory: bytes of device memory.
        ranks_per_host: the number of ranks that are connected by ``local``; ranks of different
            hosts are connected by ``remote``.
        local: the link between ranks of a host.
        remote: the link between hosts, which the ranks of a host share.
        overlap: the fraction of a collective, from 0 to 1, that runs beside computation; the rest
            stops the computation.
        backend: c10d's backend, "nccl" or "gloo"; the backends need different buffers.
        source: the source of the numbers.
        compared: how far plans for this machine were off.

    Raises:
        ValueError: a number is out of range, or ``flops`` lacks ``torch.float32``.
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
                raise ValueError(f"'{name}' of a machine must be a positive number, got {value!r}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"'overlap' of a machine must be from 0 to 1, got {self.overlap!r}")
        if self.ranks_per_host < 1 or self.ranks_per_host != int(self.ranks_per_host):
            raise ValueError(
                f"'ranks_per_host' of a machine must be an integer, got {self.ranks_per_host!r}"
            )

    @property
    def provenance(self) -> str:
        """The source of the numbers, and how far plans with them were off."""
        return f"{self.name}: {self.source or 'numbers of your own'}; {self.compared}"

    def with_numbers(self, **numbers: float) -> "Machine":
        """Returns a copy of the machine with some numbers replaced.

        Args:
            numbers: attributes by name, in the attribute's unit; also ``local_bandwidth``,
                ``local_latency``, ``remote_bandwidth`` and ``remote_latency``. ``flops`` applies
                to all dtypes.

        Raises:
            ValueError: a machine has no such number, or the number is out of range.
        """
        changed: dict[str, Any] = {}
        for name, value in numbers.items():
            link, _, number = name.partition("_")
            if name == "flops":
                changed[name] = dict.fromkeys(self.flops, value)
            elif name in _LINK_NUMBERS:
                changed[link] = replace(changed.get(link, getattr(self, link)), **{number: value})
            elif name == "ranks_per_host" and value == int(value):
                changed[name] = int(value)
            elif name in ("ranks_per_host", "overlap", *_NUMBERS):
                changed[name] = value
            else:
                known = ("flops", "ranks_per_host", "overlap", *_NUMBERS, *_LINK_NUMBERS)
                raise ValueError(f"a machine has no '{name}'; it has {', '.join(known)}")
        if not numbers:
            return self
        told = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
        source = f"{self.source}; by you: {told}".removeprefix("; ")
        return replace(self, **changed, source=source, compared=_NOT_COMPARED)

    def flops_of(self, dtype: torch.dtype) -> float:
        """Returns the FLOP/s of products in ``dtype``, or in fp32 if ``dtype`` is not known."""
        return self.flops.get(dtype, self.flops[torch.float32])

    def seconds_of_kernel(self, flops: float, dtype: torch.dtype, nbytes: float) -> float:
        """Returns the seconds of a kernel, by the roofline model."""
        return self.launch + max(flops / self.flops_of(dtype), nbytes / self.bandwidth)

    def bytes_over_links(self, op: str, nbytes: int, ranks: "Ranks") -> tuple[float, float]:
        """Returns the bytes that a rank of the last host receives from its host and from others.

        NCCL passes rows on within a host: one rank receives each from another host. Over gloo each
        rank receives all rows itself.

        Args:
            op: "all_gather", "reduce_scatter" or "all_reduce".
            nbytes: bytes of the full buffer.
            ranks: the ranks that take part.
        """
        both_ways = 2 if op == "all_reduce" else 1
        whole = both_ways * nbytes
        remote = whole * (1 - ranks.on_last_host / ranks.number)
        if self.backend != "gloo":
            remote /= ranks.on_last_host  # ranks of a host share it
        return whole * (ranks.number - 1) / ranks.number - remote, remote

    def seconds_of_collective(self, op: str, nbytes: int, ranks: "Ranks") -> float:
        """Returns seconds of a collective: links work in parallel, steps of a ring in sequence."""
        local, remote = self.bytes_over_links(op, nbytes, ranks)
        steps = 2 if op == "all_reduce" else 1
        latency = self.local.latency * (ranks.on_host - 1) * ranks.hosts
        latency += self.remote.latency * (ranks.hosts - 1)
        moving = max(local / self.local.bandwidth, remote / self.remote.bandwidth)
        return self.launch + steps * latency + moving


@dataclass(frozen=True)
class Ranks:
    """The ranks of a collective."""

    number: int
    on_host: int  #: the number of ranks on each host

    @property
    def hosts(self) -> int:
        """The number of hosts of the ranks."""
        return -(-self.number // self.on_host)

    @property
    def on_last_host(self) -> int:
        """The number of ranks on the last host, which has the fewest, and receives most."""
        return self.number - self.on_host * (self.hosts - 1)


_NUMBERS = ("bandwidth", "update_bandwidth", "launch", "memory")
_LINK_NUMBERS = ("local_bandwidth", "local_latency", "remote_bandwidth", "remote_latency")


def machine_of(machine: Machine | str) -> Machine:
    """Returns the machine, or the machine of :data:`MACHINES` with this name.

    Raises:
        ValueError: no machine has this name.
    """
    if isinstance(machine, Machine):
        return machine
    if machine not in MACHINES:
        raise ValueError(f"machine is a Machine or one of {', '.join(MACHINES)}, got {machine!r}")
    return MACHINES[machine]


# Fractions of the advertised numbers that an efficient program reaches. Measurements override them.
_OF_FLOPS, _OF_BANDWIDTH, _OF_LINK = 0.7, 0.85, 0.8


# A GPU by its data sheet: TFLOP/s in 16-bit dtypes, without sparsity, and in fp32; TB/s and GB of
# its memory; GB/s of its links within the host and of its network adapter, in one direction.
_SHEETS = {
    "a100": (312, 19.5, 2.039, 80, 300, 25),
    "h100": (989, 67, 3.35, 80, 450, 50),
    "h200": (989, 67, 4.8, 141, 450, 50),
    "b200": (2250, 75, 7.7, 180, 900, 50),
}
_SOURCES = {
    "a100": "NVIDIA A100 80GB SXM data sheet; a 200 Gb/s adapter a GPU, as DGX A100 has",
    "h100": "NVIDIA H100 SXM data sheet; a 400 Gb/s adapter a GPU, as DGX H100 has",
    "h200": "NVIDIA H200 SXM data sheet; a 400 Gb/s adapter a GPU, as DGX H200 has",
    "b200": "NVIDIA HGX B200 data sheet, a GPU's part; a 400 Gb/s adapter a GPU",
}


def _gpu(name: str) -> Machine:
    low, fp32, terabytes, gigabytes, link, adapter = _SHEETS[name]
    low_flops = low * 1e12 * _OF_FLOPS
    flops = {torch.bfloat16: low_flops, torch.float16: low_flops}
    return Machine(
        name=name,
        flops=flops | {torch.float32: fp32 * 1e12 * _OF_FLOPS},
        bandwidth=terabytes * 1e12 * _OF_BANDWIDTH,
        update_bandwidth=terabytes * 1e12 * _OF_BANDWIDTH,
        launch=5e-6,
        memory=gigabytes * 1e9,
        ranks_per_host=8,
        local=Link(1e-6, link * 1e9 * _OF_LINK),
        remote=Link(5e-6, adapter * 1e9 * _OF_LINK),
        source=_SOURCES[name],
    )


MACHINES = {name: _gpu(name) for name in _SHEETS}
