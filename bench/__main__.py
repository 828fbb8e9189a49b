"""``python -m bench``: compares modes of training, whose steps alternate.

python -m bench                                          # most workloads and modes
python -m bench -w A -m floor,zero3,fsdp2-blocks         # parts
python -m bench -w B --malloc tuned                      # without the allocator's page faults
python -m bench compile -w A -m floor,zero3              # the first step, cold and warm
python -m bench -w B -m zero3-c10d-twice,without-pool    # without one optimization
python -m bench primitives                               # of gloo, at some sizes
python -m bench overhead                                 # a step of 300 small parameters
python -m bench host                                     # the host's time by phase of a step
python -m bench hosts --rate 1gbit                       # two hosts with a link; as root
python -m bench optimizers                               # steps of Muon and AdamW on shards
python -m bench agreement -w B,deep                      # how long ranks take to agree on gradients
python -m bench gpu                                      # on a GPU: kernels, a step, what overlaps
python -m bench plan -w A,B --ranks 1 2                  # predicted steps beside measured ones
python -m bench digest -w B                              # the price of a digest at each tenth step
python -m bench saves -w B                               # steps during a save, and the next start
python -m bench stream                                   # full parameters out of ranks, and files
python -m bench offload --shape small                    # training with less memory than it takes
python -m bench table build/bench/*.json                 # earlier results
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import track

from bench import digests, gpu, host, hosts, optimizers, planning, report, saves, streams
from bench import offload as offloading
from bench import overhead as small
from bench import primitives as gloo
from bench.ablations import ABLATIONS
from bench.modes import MODES, ON_GPU, OVER_HOSTS
from bench.ranks import Ranks, Training
from bench.workloads import WORKLOADS

# glibc's allocator keeps freed memory, so that no page is faulted in twice.
TUNED_MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000"}

console = Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.malloc == "tuned":
        os.environ.update(TUNED_MALLOC)  # before the ranks' processes start
    args.run(args)


def steps(args: argparse.Namespace) -> None:
    """Times steps. The ranks of every mode stay resident; a round is one step of each mode."""
    args.output.mkdir(parents=True, exist_ok=True)
    found = []
    for workload in args.workloads:
        results = _steps(workload, args)
        found.append(results)
        name = workload if args.malloc == "default" else f"{workload}-{args.malloc}-malloc"
        (args.output / f"{name}.json").write_text(json.dumps(results, indent=1))
        _print(results)
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
    return _about(workload, args) | {
        "tokens": shape.batch * shape.sequence * args.ranks,
        "modes": modes,
    }


def compile(args: argparse.Namespace) -> None:
    """Times the first step of each mode alone: with an empty compiler cache, then a full one."""
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
    print("\n".join(lines))
    plot = args.output / "compile.png"
    report.plot_first_steps(found, plot)
    console.print(plot)


def primitives(args: argparse.Namespace) -> None:
    """Times gloo's primitives for gathering and reducing: GB of full buffers per second."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.list()
        mp.spawn(gloo.run, (args.ranks, f"{folder}/store", results), args.ranks)
        print("| dtype | MiB | primitive | ms | GB/s | processor s/GB |")
        print("| --- | ---: | --- | ---: | ---: | ---: |")
        for dtype, nbytes, name, wall, processor in results:
            speed, price = nbytes / 1e9 / wall, processor / (nbytes / 1e9)
            row = f"{nbytes / 2**20:g} | {name} | {wall * 1e3:.2f} | {speed:.2f} | {price:.2f}"
            print(f"| {dtype} | {row} |")


def overhead(args: argparse.Namespace) -> None:
    """Times a step of 300 small parameters on one rank, sharded and unsharded."""
    with tempfile.TemporaryDirectory() as folder:
        medians = small.measure(f"{folder}/store")
    base = next(iter(medians.values()))
    print("| 300 parameters | ms a step | more, µs a parameter |\n| --- | ---: | ---: |")
    for name, seconds in medians.items():
        print(f"| {name} | {seconds * 1e3:.2f} | {(seconds - base) / 300 * 1e6:.1f} |")


def host_time(args: argparse.Namespace) -> None:
    """Times the host: microseconds of a rank's processor a parameter, for each phase of a step."""
    print(f"| blocks | mode | {' | '.join(host.PHASES)} | all |")
    print(f"| ---: | --- |{' ---: |' * (len(host.PHASES) + 1)}")
    for blocks in args.blocks:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            rows = manager.list()
            given = args.ranks, f"{folder}/store", blocks, args.rounds, rows
            with console.status(
                f"{blocks} blocks: compiling, and {args.rounds} steps of each mode"
            ):
                mp.spawn(host.measure, given, args.ranks)
            for name, phases in rows:
                each = [1e6 * seconds / (host.PARAMETERS * blocks) for seconds in phases]
                cells = " | ".join(f"{time:.1f}" for time in (*each, sum(each)))
                print(f"| {blocks} | {name} | {cells} |")


def over_hosts(args: argparse.Namespace) -> None:
    """Times steps over two hosts, network namespaces with a link between them. Needs root."""
    for workload in args.workloads:
        with console.status(f"{workload}: {args.rounds} steps of {', '.join(args.modes)}"):
            given = workload, args.modes, args.rate, args.ranks, args.rounds
            rows = list(hosts.compare(*given))
        print(f"\n## {workload}: {WORKLOADS[workload].about}\n")
        ranks = f"2 hosts of {args.ranks} ranks, {args.rate}"
        print(f"`{_command()}`, {_machine(ranks)}, {_now()}\n")
        print(hosts.table(rows, workload, args.rate))


def step_optimizers(args: argparse.Namespace) -> None:
    """Times Muon on a Llama of 4 layers, and AdamW on 1,500 small parameters."""

    def rows_of(run: Callable) -> list:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            rows = manager.list()
            mp.spawn(run, (args.ranks, f"{folder}/store", args.rounds, rows), args.ranks)
            return list(rows)

    rows = rows_of(optimizers.muon)
    base = rows[0][1]
    print("| optimizer | ms a step | owners' time over it | collectives |")
    print("| --- | ---: | ---: | ---: |")
    for name, seconds, collectives in rows:
        print(f"| {name} | {seconds * 1e3:.0f} | {base / seconds:.2f} | {collectives} |")
    print("\n| optimizer | parameters | clip, ms | step | zero_grad | over plain |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for kind, name, *times in rows_of(optimizers.small):
        if "plain" in name:
            base = sum(times)
        cells = " | ".join(f"{seconds * 1e3:.1f}" for seconds in times)
        print(f"| {kind} | {name} | {cells} | {sum(times) / base:.2f} |")


def agreement(args: argparse.Namespace) -> None:
    """Times how long ranks take to tell each other which gradients come. The time is that of the
    rank that comes last, which does not wait for others.
    """
    print("| workload | mode | µs a step | of a step |\n| --- | --- | ---: | ---: |")
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
            told = statistics.median(min(told for told, _ in step) for step in steps)
            step = statistics.median(max(wall for _, wall in step) for step in steps)
            print(f"| {workload} | {mode} | {told * 1e6:.0f} | {told / step:.2%} |")


def plan(args: argparse.Namespace) -> None:
    """Compares measured steps with steps that are predicted from the ranks' measurements."""
    lines = [planning.HEAD]
    for ranks in args.ranks:
        for workload in args.workloads:
            with console.status(f"{workload} on {ranks}"):
                found = planning.compare(workload, ranks, args.rounds, args.steps)
            lines.append(found.row(workload, ranks))
            console.print(lines[-1])
    print(f"`{_command()}`, {_machine()}, {_now()}\n")
    print("\n".join(lines))


def digest(args: argparse.Namespace) -> None:
    """Times steps with a digest of shards, gradients and states, and steps without."""
    lines = [digests.HEAD]
    for workload in args.workloads:
        with console.status(f"{workload}: compiling, and {args.rounds} steps of each kind"):
            lines.append(digests.measure(workload, args.ranks, args.rounds).row(workload))
    print(f"`{_command()}`, {_machine(f'{args.ranks} ranks')}, {_now()}\n")
    print("\n".join(lines))


def save(args: argparse.Namespace) -> None:
    """Times steps while a checkpoint is saved, and the start of a run that resumes from one."""
    lines = [saves.HEAD]
    starts = [f"| workload | cache | processes | {' | '.join(saves.PHASES)} |"]
    starts.append(f"| --- | --- |{' ---: |' * (len(saves.PHASES) + 1)}")
    for workload in args.workloads:
        with console.status(f"{workload}: compiling, and {args.rounds} saves"):
            taken = saves.measure(workload, args.ranks, args.rounds, args.folder)
            lines += [times.row(workload, kind) for kind, times in taken.items()]
            for temperature, phases in saves.resume(workload, args.ranks, args.folder):
                cells = " | ".join(f"{seconds:.2f}" for seconds in phases)
                starts.append(f"| {workload} | {temperature} | {cells} |")
    print(f"`{_command()}`, {_machine(f'{args.ranks} ranks')}, {_now()}\n")
    print("\n".join([*lines, "", *starts]))


def stream(args: argparse.Namespace) -> None:
    """Streams full parameters, beside a plain copy, and loads files into 1, 2 and 4 ranks."""
    with console.status(f"a model of {args.mib} MiB"):
        lines = streams.measure(args.mib, args.ranks, args.max_mb, args.rounds, args.folder)
    print(f"`{_command()}`, {_machine(f'{args.ranks} ranks')}, {_now()}\n")
    print("\n".join(lines))


def offload(args: argparse.Namespace) -> None:
    """Trains with a budget of memory, and what exceeds it in a file, beside training in memory."""
    written, read = offloading.bandwidth(args.folder)
    rows = []
    given = args.shape, args.budget_mb, args.folder, args.cgroup, args.rounds
    for row in offloading.compare(*given):
        rows.append(row)
        console.print(row.name)
    print(f"`{_command()}`, {_machine('2 ranks')}, {_now()}\n")
    print(offloading.table(rows))
    print(f"\nThe disk: {written / 1e9:.2f} GB/s written, {read / 1e9:.2f} GB/s read.")


def table(args: argparse.Namespace) -> None:
    """Prints results from files."""
    for path in args.files:
        _print(json.loads(path.read_text()))


def _print(results: dict) -> None:
    about = WORKLOADS[results["workload"]].about
    print(f"\n## {results['workload']}: {about}\n")
    print(f"`{results['command']}`, {results['machine']}, {results['time']}\n")
    print(report.table(results))


def _about(workload: str, args: argparse.Namespace) -> dict:
    return {
        "workload": workload,
        "command": _command(),
        "machine": _machine(f"{args.ranks} ranks, {args.malloc} malloc"),
        "time": _now(),
    }


def _command() -> str:
    return shlex.join(["python", "-m", "bench", *sys.argv[1:]])


def _machine(*settings: str) -> str:
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    versions = f"torch {torch.__version__}", f"Python {platform.python_version()}"
    return ", ".join((cores, *settings, *versions))


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    modes = MODES | ABLATIONS
    legend = {f"mode {name}": mode.about for name, mode in modes.items()}
    legend |= {f"workload {name}": workload.about for name, workload in WORKLOADS.items()}
    legend |= {f"column {name}": meaning for name, meaning in report.COLUMNS.items()}
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog="\n".join(f"{name:22} {meaning}" for name, meaning in legend.items()),
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.set_defaults(run=steps)
    parts = parser.add_subparsers(title="parts", metavar="PART")
    for part in (parser, parts.add_parser("compile", help=compile.__doc__)):
        part.add_argument(
            "-w",
            "--workloads",
            type=_names(WORKLOADS),
            default=_DEFAULT_WORKLOADS,
            metavar="A,B,...",
            help="all but tiny (which takes a minute) and depth-N without this",
        )
        part.add_argument(
            "-m",
            "--modes",
            type=_names(modes),
            default=list(MODES),
            metavar="M,...",
            help="by default all but those of bench/ablations.py",
        )
        part.add_argument("--ranks", type=int, default=2, help="processes of each mode")
        part.add_argument(
            "--malloc",
            choices=["default", "tuned"],
            default="default",
            help="tuned: without the page faults of glibc's",
        )
    part.add_argument("--output", type=Path, default=Path("build/bench"), help="folder of the plot")
    part.set_defaults(run=compile)
    times = parts.add_parser("host", help=host_time.__doc__)
    times.add_argument("--blocks", type=int, nargs="+", default=[64, 256], metavar="N")
    times.add_argument("--ranks", type=int, default=2)
    times.add_argument("--rounds", type=int, default=15, help="steps of each mode")
    times.set_defaults(run=host_time, malloc="default")
    linked = parts.add_parser("hosts", help=over_hosts.__doc__)
    linked.add_argument("-w", "--workloads", type=_names(WORKLOADS), default=["B", "A"])
    linked.add_argument("-m", "--modes", type=_names(OVER_HOSTS), default=list(OVER_HOSTS))
    linked.add_argument("--rate", default="1gbit", help="of the link, such as 1gbit or 250mbit")
    linked.add_argument("--ranks", type=int, default=2, help="of each host")
    linked.add_argument("--rounds", type=int, default=9, help="steps of each mode")
    linked.set_defaults(run=over_hosts, malloc="default")
    owned = parts.add_parser("optimizers", help=step_optimizers.__doc__)
    owned.add_argument("--ranks", type=int, default=2)
    owned.add_argument("--rounds", type=int, default=15, help="steps of each optimizer")
    owned.set_defaults(run=step_optimizers, malloc="default")
    told = parts.add_parser("agreement", help=" ".join(str(agreement.__doc__).split()))
    told.add_argument("-w", "--workloads", type=_names(WORKLOADS), default=["B", "deep"])
    told.add_argument("-m", "--modes", type=_names(modes), default=["zero3", "zero3-c10d"])
    told.set_defaults(run=agreement, ranks=2, malloc="default")
    predicted = parts.add_parser("plan", help=plan.__doc__)
    predicted.add_argument(
        "-w", "--workloads", type=_names(WORKLOADS), default=_DEFAULT_WORKLOADS, metavar="A,B,..."
    )
    predicted.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    predicted.add_argument("--rounds", type=int, default=6, help="predictions (default: 6)")
    predicted.add_argument("--steps", type=int, default=3, help="of each round (default: 3)")
    predicted.set_defaults(run=plan, malloc="default")
    for part in (parser, told):
        part.add_argument("--rounds", type=int, default=15, help="steps of each mode")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument(
        "--output", type=Path, default=Path("build/bench"), help="folder of results (build/bench)"
    )
    witnessed = parts.add_parser("digest", help=digest.__doc__)
    witnessed.add_argument("-w", "--workloads", type=_names(WORKLOADS), default=["A", "B"])
    witnessed.add_argument("--ranks", type=int, default=2)
    witnessed.add_argument("--rounds", type=int, default=15, help="steps of each kind")
    witnessed.set_defaults(run=digest, malloc="default")
    saved = parts.add_parser("saves", help=save.__doc__)
    saved.add_argument("-w", "--workloads", type=_names(WORKLOADS), default=["A", "B"])
    saved.add_argument("--ranks", type=int, default=2)
    saved.add_argument("--rounds", type=int, default=5, help="saves")
    saved.add_argument("--folder", default=".", help="on the disk to save to")
    saved.set_defaults(run=save, malloc="default")
    streamed = parts.add_parser("stream", help=stream.__doc__)
    streamed.add_argument("--mib", type=int, default=2048, help="size of the model")
    streamed.add_argument("--max-mb", type=float, nargs="+", default=[32, 128], metavar="MB")
    streamed.add_argument("--ranks", type=int, default=2)
    streamed.add_argument("--rounds", type=int, default=6, help="streams, and copies, of each size")
    streamed.add_argument("--folder", default=".", help="on the disk for the files")
    streamed.set_defaults(run=stream, malloc="default")
    files = parts.add_parser("offload", help=offload.__doc__)
    files.add_argument("--shape", choices=offloading.SHAPES, default="small", help="of the Llama")
    files.add_argument("--budget-mb", type=float, default=0.0, help="memory_budget_mb (default: 0)")
    files.add_argument("--folder", default=".", help="on the disk to offload to")
    files.add_argument("--cgroup", help="folder of a control group, with the limit to train in")
    files.add_argument("--rounds", type=int, default=3, help="measured steps")
    files.set_defaults(run=offload, malloc="default")
    raw = parts.add_parser("primitives", help=primitives.__doc__)
    raw.add_argument("--ranks", type=int, default=2)
    raw.add_argument("--malloc", choices=["default", "tuned"], default="default")
    raw.set_defaults(run=primitives)
    parts.add_parser("overhead", help=overhead.__doc__).set_defaults(run=overhead, malloc="default")
    on_gpu = parts.add_parser("gpu", help=gpu.run.__doc__, description=gpu.__doc__)
    gpu.add_arguments(on_gpu, _names(ON_GPU | modes), _names(dict.fromkeys(["kernels", "steps"])))
    reread = parts.add_parser("table", help=table.__doc__)
    reread.add_argument("files", type=Path, nargs="+")
    reread.set_defaults(run=table)
    return parser.parse_args(arguments)


_DEFAULT_WORKLOADS = [name for name in WORKLOADS if name != "tiny" and "depth" not in name]


def _names(known: dict) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if unknown := sorted(set(names := text.split(",")) - set(known)):
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)} is not among {', '.join(known)}"
            )
        return names

    return parse


if __name__ == "__main__":
    main()
