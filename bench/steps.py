"""Times the steps of modes in turn."""

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.progress import track

from bench import report
from bench.ablations import ABLATIONS
from bench.command_line import add_ranks, add_workloads, command, console, machine, names, now
from bench.modes import MODES
from bench.ranks import Ranks, Training
from bench.workloads import WORKLOADS

# glibc's allocator keeps freed memory, so that no page is faulted in twice.
_TUNED_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000"}


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    add_workloads(part)
    add_modes(part)
    add_ranks(part)
    add_malloc(part)
    part.add_argument("--rounds", type=int, default=15, help="steps of each mode")
    part.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    part.add_argument(
        "--output", type=Path, default=Path("build/bench"), help="folder of results (build/bench)"
    )


def add_modes(part: argparse.ArgumentParser) -> None:
    """Adds ``--modes``."""
    part.add_argument(
        "-m",
        "--modes",
        type=names(MODES | ABLATIONS),
        default=list(MODES),
        metavar="M,...",
        help="by default all but those of bench/ablations.py",
    )


def add_malloc(part: argparse.ArgumentParser) -> None:
    """Adds ``--malloc``."""
    part.add_argument(
        "--malloc",
        choices=["default", "tuned"],
        default="default",
        help="tuned: without the page faults of glibc's",
    )


def tune_malloc(malloc: str) -> None:
    """Tells processes that start from now on to keep freed memory, or leaves them as they are."""
    if malloc == "tuned":
        os.environ.update(_TUNED_MALLOC)


def run(args: argparse.Namespace) -> None:
    """Times steps. The ranks of every mode stay resident; a round is one step of each mode."""
    tune_malloc(args.malloc)
    args.output.mkdir(parents=True, exist_ok=True)
    found = []
    for workload in args.workloads:
        results = _steps(workload, args)
        found.append(results)
        name = workload if args.malloc == "default" else f"{workload}-{args.malloc}-malloc"
        (args.output / f"{name}.json").write_text(json.dumps(results, indent=1))
        print_results(results)
    plot = args.output / f"steps-{args.malloc}-malloc.png"
    report.plot(found, plot)
    console.print(f"{args.output}/*.json, {plot}")


def _steps(workload: str, args: argparse.Namespace) -> dict:
    ranks: dict[str, Ranks] = {}
    modes: dict[str, dict] = {}
    try:
        for mode in args.modes:
            with (
                console.status(f"{workload}: compiling {mode}"),
                tempfile.TemporaryDirectory() as cache,
            ):
                ranks[mode] = Ranks(partial(Training, workload, mode), args.ranks, cache)
                first = max(cost.wall for cost in ranks[mode].call("step"))
                for _ in range(args.warmup):
                    ranks[mode].call("step")
                modes[mode] = {
                    "first_step": first,
                    "collectives": ranks[mode].call("collectives")[0],
                    "steps": [],
                }
                ranks[mode].call("memory")
        for _ in track(range(args.rounds), workload, console=console):
            for mode in args.modes:
                modes[mode]["steps"].append([asdict(cost) for cost in ranks[mode].call("step")])
        for mode in args.modes:
            modes[mode]["memory"] = [asdict(memory) for memory in ranks[mode].call("memory")]
    finally:
        for resident in ranks.values():
            resident.close()
    shape = WORKLOADS[workload]
    return {
        "workload": workload,
        "command": command(),
        "machine": machine(f"{args.ranks} ranks, {args.malloc} malloc"),
        "time": now(),
        "tokens": shape.batch * shape.sequence * args.ranks,
        "modes": modes,
    }


def print_results(results: dict) -> None:
    """Prints what :func:`run` found for a workload."""
    about = WORKLOADS[results["workload"]].about
    print(f"\n## {results['workload']}: {about}\n")
    print(f"`{results['command']}`, {results['machine']}, {results['time']}\n")
    print(report.table(results))
