"""Times how long ranks take to tell each other which gradients come."""

import argparse
import tempfile
from functools import partial
from statistics import median

from bench.ablations import ABLATIONS
from bench.command_line import add_ranks, add_workloads, console, names, print_table
from bench.modes import MODES
from bench.ranks import Ranks, Training


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_workloads(part, ["B", "deep"])
    add_ranks(part)
    part.add_argument(
        "-m", "--modes", type=names(MODES | ABLATIONS), default=["zero3", "zero3-c10d"]
    )
    part.add_argument("--rounds", type=int, default=15, help="steps of each mode")


def run(args: argparse.Namespace) -> None:
    """Times how long ranks take to tell each other which gradients come. The time is that of the
    rank that comes last, which does not wait for others.
    """
    lines = ["| workload | mode | µs a step | of a step |", "| --- | --- | ---: | ---: |"]
    for workload in args.workloads:
        for mode in args.modes:
            with (
                console.status(f"{workload}: {mode}"),
                tempfile.TemporaryDirectory() as cache,
            ):
                ranks = Ranks(partial(Training, workload, mode), args.ranks, cache)
                try:
                    steps = [ranks.call("agreement") for _ in range(args.rounds + 3)][3:]
                finally:
                    ranks.close()
            told = median(min(told for told, _ in step) for step in steps)
            step = median(max(wall for _, wall in step) for step in steps)
            lines.append(f"| {workload} | {mode} | {told * 1e6:.0f} | {told / step:.2%} |")
    print_table(lines, f"{args.ranks} ranks")
