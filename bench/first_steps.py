"""Times first steps, with an empty cache of compiled code and with a full one."""

import argparse
import tempfile
from functools import partial
from pathlib import Path

from bench import report, steps
from bench.command_line import add_ranks, add_workloads, console, print_table
from bench.ranks import Ranks, Training
from bench.workloads import WORKLOADS


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_workloads(part)
    steps.add_modes(part)
    add_ranks(part)
    steps.add_malloc(part)
    part.add_argument("--output", type=Path, default=Path("build/bench"), help="folder of the plot")


def run(args: argparse.Namespace) -> None:
    """Times the first step of each mode alone: with an empty compiler cache, then a full one."""
    steps.tune_malloc(args.malloc)
    args.output.mkdir(parents=True, exist_ok=True)
    lines = ["| workload | mode | cold, s | warm, s |", "| --- | --- | ---: | ---: |"]
    found = []
    for workload in args.workloads:
        for mode in args.modes:
            with tempfile.TemporaryDirectory() as cache:
                seconds = []
                for temperature in ("cold", "warm"):
                    with console.status(f"{workload}: {mode}, {temperature}"):
                        ranks = Ranks(partial(Training, workload, mode), args.ranks, cache)
                        try:
                            seconds.append(max(cost.wall for cost in ranks.call("step")))
                        finally:
                            ranks.close()
            cold, warm = seconds
            lines.append(f"| {workload} | {mode} | {cold:.1f} | {warm:.1f} |")
            console.print(lines[-1])
            layers = WORKLOADS[workload].layers
            found.append({"mode": mode, "layers": layers, "cold": cold, "warm": warm})
    print_table(lines, f"{args.ranks} ranks")
    plot = args.output / "compile.png"
    report.plot_first_steps(found, plot)
    console.print(plot)
