"""Trains over two hosts of this machine, with a link of a chosen rate; each has half of the ranks.

Ranks of a namespace share the memory of this machine with those of the other one. Modes whose
shards lie on both therefore exchange messages.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory

import torch.distributed as dist

from bench.command_line import add_workloads, console, names, print_table
from bench.link import NoHostsError, bytes_sent, enter, linked_hosts
from bench.modes import HOSTS, OVER_HOSTS
from bench.ranks import Cost, Ranks, Training
from bench.workloads import WORKLOADS
from deepcompile_zero3.tools.arguments import rate as bytes_per_second


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_workloads(part, ["B", "A"])
    part.add_argument("-m", "--modes", type=names(OVER_HOSTS), default=list(OVER_HOSTS))
    part.add_argument(
        "--rate", type=_rate, default="1gbit", help="of the link, such as 1gbit or 250mbit"
    )
    part.add_argument("--ranks", type=int, default=2, help="of each host")
    part.add_argument("--rounds", type=int, default=9, help="steps of each mode")


def _rate(text: str) -> str:
    """Returns the rate of a link; refuses what is none."""
    bytes_per_second(text)
    return text


def run(args: argparse.Namespace) -> None:
    """Times steps over two hosts, network namespaces with a link between them. Needs root."""
    for workload in args.workloads:
        with console.status(f"{workload}: {args.rounds} steps of {', '.join(args.modes)}"):
            try:
                rows = list(compare(workload, args.modes, args.rate, args.ranks, args.rounds))
            except NoHostsError as error:
                raise SystemExit(str(error)) from None
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


class OnHost(Training):
    """A rank of one mode, in the namespace that ``names`` have for it."""

    def __init__(
        self, names: Sequence[str], workload: str, mode: str, rank: int, world_size: int, store: str
    ) -> None:
        enter(names[rank * len(names) // world_size])
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
                before = [bytes_sent(name) for name in names]
                wall = max(cost.wall for cost in ranks[mode].call("step"))
                after = [bytes_sent(name) for name in names]
                sent = max(b - a for a, b in zip(before, after, strict=True))
                steps[mode].append((wall, sent))
        for mode in modes:
            yield Row(mode, *(median(each) for each in zip(*steps[mode], strict=True)))


def table(rows: Sequence[Row], workload: str, rate: str) -> str:
    """Returns a table of the modes, beside what the link takes for each element once each way."""
    model = WORKLOADS[workload].build()
    once = sum(p.numel() * p.element_size() for p in model.parameters())
    by_mode = {row.mode: row for row in rows}
    floor = by_mode["floor"].seconds if "floor" in by_mode else 0.0
    bound = once / bytes_per_second(rate)
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
