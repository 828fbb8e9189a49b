"""Trains over two hosts: network namespaces of this machine, with a link of a chosen rate.

::

    namespace zero3-0   device "wire"   <- tbf, veth ->   device "wire"   namespace zero3-1
    ranks 0, 1, ...                                       the other half of the ranks

Ranks of a namespace share the memory of this machine with those of the other one. Modes whose
shards lie on both therefore exchange messages.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory

import torch.distributed as dist

from bench.command_line import add_workloads, console, names, print_table
from bench.modes import HOSTS, OVER_HOSTS
from bench.ranks import Cost, Ranks, Training
from bench.workloads import WORKLOADS

_DEVICE = "wire"  # the name of either end of the link
_CLONE_NEWNET = 0x40000000  # of Linux's setns()


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_workloads(part, ["B", "A"])
    part.add_argument("-m", "--modes", type=names(OVER_HOSTS), default=list(OVER_HOSTS))
    part.add_argument("--rate", default="1gbit", help="of the link, such as 1gbit or 250mbit")
    part.add_argument("--ranks", type=int, default=2, help="of each host")
    part.add_argument("--rounds", type=int, default=9, help="steps of each mode")


def run(args: argparse.Namespace) -> None:
    """Times steps over two hosts, network namespaces with a link between them. Needs root."""
    for workload in args.workloads:
        with console.status(f"{workload}: {args.rounds} steps of {', '.join(args.modes)}"):
            rows = list(compare(workload, args.modes, args.rate, args.ranks, args.rounds))
        print(f"\n## {workload}: {WORKLOADS[workload].about}\n")
        print_table(
            [table(rows, workload, args.rate)], f"2 hosts of {args.ranks} ranks, {args.rate}"
        )


@dataclass(frozen=True)
class Row:
    """What a mode takes, medians of its steps.

    Attributes:
        seconds: of a step, on the slowest rank.
        sent: bytes that each host sent over the link in a step, with all headers.
    """

    mode: str
    seconds: float
    sent: float


@contextmanager
def linked_hosts(rate: str) -> Iterator[list[str]]:
    """Makes two namespaces and a link between them, and yields their names.

    Args:
        rate: the link's, as tc has it, such as "1gbit".

    Raises:
        SystemExit: this process is not root's, or iproute2 is missing.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit(
            "two hosts are network namespaces: run this as root, with ip and tc (Debian: iproute2) "
            "on PATH"
        )
    names = [f"zero3-{os.getpid()}-{host}" for host in range(HOSTS)]
    with ExitStack() as undo:
        for name in names:
            _run(f"ip netns add {name}")
            undo.callback(_run, f"ip netns del {name}")
        peer = f"type veth peer name {_DEVICE} netns {names[1]}"
        _run(f"ip link add name {_DEVICE} netns {names[0]} {peer}")
        for host, name in enumerate(names):
            _run(f"ip -n {name} addr add 10.213.0.{host + 1}/24 dev {_DEVICE}")
            for device in (_DEVICE, "lo"):
                _run(f"ip -n {name} link set {device} up")
            shape = f"tbf rate {rate} burst 256kb latency 50ms"
            _run(f"tc -n {name} qdisc add dev {_DEVICE} root {shape}")
        yield names


def _sent(names: Sequence[str]) -> list[int]:
    """Returns the bytes that each host has sent over the link so far."""
    path = f"/sys/class/net/{_DEVICE}/statistics/tx_bytes"
    return [int(_run(f"ip netns exec {name} cat {path}")) for name in names]


class OnHost(Training):
    """A rank of one mode, in the namespace that ``names`` have for it."""

    def __init__(
        self, names: Sequence[str], workload: str, mode: str, rank: int, world_size: int, store: str
    ) -> None:
        name = names[rank * len(names) // world_size]
        with open(f"/run/netns/{name}") as namespace:  # of this thread, and of those that it starts
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        os.environ["GLOO_SOCKET_IFNAME"] = _DEVICE
        super().__init__(workload, mode, rank, world_size, store)

    def step(self) -> Cost:
        cost = super().step()
        dist.barrier()
        return cost


def compare(
    workload: str, modes: Sequence[str], rate: str, per_host: int, rounds: int
) -> Iterator[Row]:
    """Yields what each mode takes. Their steps alternate; the ranks of all modes stay resident."""
    with linked_hosts(rate) as names, ExitStack() as resident:
        ranks: dict[str, Ranks] = {}
        for mode in modes:
            cache = resident.enter_context(TemporaryDirectory())
            make = partial(OnHost, names, workload, mode)
            ranks[mode] = Ranks(make, HOSTS * per_host, cache)
            resident.callback(ranks[mode].close)
            for _ in range(3):
                ranks[mode].call("step")
        steps: dict[str, list[tuple[float, int]]] = {mode: [] for mode in modes}
        for _ in range(rounds):
            for mode in modes:
                before = _sent(names)
                wall = max(cost.wall for cost in ranks[mode].call("step"))
                sent = max(b - a for a, b in zip(before, _sent(names), strict=True))
                steps[mode].append((wall, sent))
        for mode in modes:
            yield Row(mode, *(median(each) for each in zip(*steps[mode], strict=True)))


def table(rows: Sequence[Row], workload: str, rate: str) -> str:
    """Returns a table of the modes, beside what the link takes for each element once each way."""
    model = WORKLOADS[workload].build()
    once = sum(p.numel() * p.element_size() for p in model.parameters())
    by_mode = {row.mode: row for row in rows}
    floor = by_mode["floor"].seconds if "floor" in by_mode else 0.0
    bound = once / _bytes_per_second(rate)
    lines = [
        f"Each parameter and each gradient once, half of them each way, are {once / 1e6:.1f} MB "
        f"that a host sends. They take the link {bound * 1e3:.0f} ms.\n",
        "| mode | ms a step | over the larger of floor and link | MB sent by a host |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        over = row.seconds / max(floor, bound)
        cells = f"{row.seconds * 1e3:.0f} | {over:.2f} | {row.sent / 1e6:.1f}"
        lines.append(f"| {row.mode}: {OVER_HOSTS[row.mode].about} | {cells} |")
    return "\n".join(lines)


def _bytes_per_second(rate: str) -> float:
    units = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
    for unit, scale in units.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * scale / 8
    raise SystemExit(f"the rate of the link is such as 1gbit or 250mbit, got {rate}")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout
