"""Benchmarks on one GPU: the copy kernel, training steps of some modes, and their overlap.

All modes compute in bf16, reduce in fp32 and run fused AdamW over fp32 tensors, on a single rank.
The rank calls no collective; ``zero3-c10d`` gathers and reduces by NCCL to itself.

``plain`` is not sharded: torch.compile compiles the whole model, which is in bf16. Gradients are
cast to fp32 for AdamW, and the updated parameters are cast to bf16, as the other modes' reductions
and gathers do.
"""

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch._dynamo.utils import counters

from bench import clock, kernels, overlap
from bench.ablations import ABLATIONS
from bench.command_line import command, names, now
from bench.modes import MODES, ON_GPU
from bench.ranks import Ranks, Training
from bench.workloads import LLAMAS, Workload
from deepcompile_zero3.runtime import _C

# FLOP/s in bf16 without sparsity, by NVIDIA's data sheets.
_PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}

HEAD = (
    "| mode | ms | over {base} | of rounds | tokens/s | TFLOP/s | of peak | allocated, GB "
    "| reserved, GB | graphs | first step, s | loss |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    modes = names(ON_GPU | MODES | ABLATIONS)
    models = [name.removeprefix("llama-") for name in LLAMAS]
    some = ["plain", "zero3", "fsdp2-blocks", "zero3-again"]
    part.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    part.add_argument("--model", choices=models, default="1b", help="a Llama of so many parameters")
    part.add_argument("--layers", type=int, help="in place of the model's own number")
    part.add_argument("--batch", type=int, help="sequences of a step; what fits, without this")
    part.add_argument("--sequence", type=int, help="tokens (4096; tiny: 32)")
    part.add_argument(
        "-m",
        "--modes",
        type=modes,
        default=some,
        metavar="M,...",
        help=f"{','.join(some)} without this; others are compared with the first",
    )
    part.add_argument("--rounds", type=int, default=3, help="of a process for each mode, in turn")
    part.add_argument("--steps", type=int, default=12, help="timed in each process")
    part.add_argument("--warmup", type=int, default=3, help="steps before those, after the first")
    part.add_argument(
        "--trace",
        type=modes,
        default=["zero3", "fsdp2-blocks"],
        metavar="M,...",
        help="modes of which a step is profiled in the first round",
    )
    part.add_argument(
        "--parts",
        type=names(["kernels", "steps"]),
        default=["kernels", "steps"],
        metavar="P,...",
        help="kernels, steps; both without this",
    )
    part.add_argument(
        "--minutes", type=float, default=8.5, help="nothing begins that would take longer"
    )
    part.add_argument(
        "--longest", type=float, default=300, help="seconds that a process may take (300)"
    )
    part.add_argument(
        "--cache", type=Path, help="folder of compiled code, which later runs find; none is kept"
    )
    part.add_argument(
        "--output", type=Path, default=Path("build/bench"), help="folder of results (build/bench)"
    )


def run(args: argparse.Namespace) -> None:
    """Benchmarks on a GPU: the copy kernel, steps of some modes, and their overlap."""
    deadline = time.monotonic() + 60 * args.minutes
    if args.device == "cuda" and not (torch.cuda.is_available() and _C.WITH_CUDA):
        sys.exit(
            "there is no GPU, or the runtime was built without CUDA; --device cpu tries this out"
        )
    args.output.mkdir(parents=True, exist_ok=True)
    workload = replace(LLAMAS[f"llama-{args.model}"], **_changes(args))
    results = _about(workload, args)
    _say(f"{results['machine']}, {results['time']}\n")

    def save() -> None:
        written = args.output / "gpu.json.new"
        written.write_text(json.dumps(results, indent=1))
        written.replace(args.output / "gpu.json")

    if "kernels" in args.parts:
        _kernels(args, results, save)
    if "steps" in args.parts:
        _steps(args, results, save, deadline)
    save()
    _say(f"{args.output}/gpu.json")
    if results["missing"]:
        sys.exit(f"not measured: {', '.join(results['missing'])}")


def time_steps(step: Callable, batches: list[torch.Tensor], warmup: int) -> dict:
    """Returns the number of compiled graphs, seconds of the first step and of each step after
    ``warmup`` more, GPU memory, and the last loss.

    A step lasts from the end of the previous step to its own end; the host does not wait in
    between. Memory is in bytes.
    """
    device = batches[0].device.type
    start = time.perf_counter()
    step(batches[0])
    clock.wait(device)
    first = time.perf_counter() - start
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # memory that compiling took
        torch.cuda.reset_peak_memory_stats()
    for batch in batches[1 : 1 + warmup]:
        step(batch)
    moments = [clock.mark(device)]
    for batch in batches[1 + warmup :]:
        loss = step(batch)
        moments.append(clock.mark(device))
    clock.wait(device)
    on_gpu = device == "cuda"
    return {
        "graphs": counters["stats"].get("unique_graphs", 0),
        "first": first,
        "steps": [clock.seconds(*both) for both in pairwise(moments)],
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "loss": float(loss),
    }


def table(results: dict) -> str:
    """Returns a Markdown table, a row for each mode, over the rounds that have the mode."""
    rounds = results["rounds"]
    modes = [
        mode for mode in results["modes"] if any("steps" in each.get(mode, {}) for each in rounds)
    ]
    if not modes:
        return "no mode took a step"
    lines = [HEAD.format(base=modes[0])]
    for mode in modes:
        measured = [each[mode] for each in rounds if "steps" in each.get(mode, {})]
        seconds = median(median(each["steps"]) for each in measured)
        ratios = [
            median(each[mode]["steps"]) / median(each[modes[0]]["steps"])
            for each in rounds
            if "steps" in each.get(mode, {}) and "steps" in each.get(modes[0], {})
        ]
        flops = results["flops"] / seconds
        peak = _PEAK_FLOPS.get(results["gpu"])
        columns = [
            mode,
            f"{seconds * 1e3:.1f}",
            f"{median(ratios):.3f}" if ratios else "",
            f"{min(ratios):.3f} to {max(ratios):.3f} ({len(ratios)})" if ratios else "",
            f"{results['tokens'] / seconds:,.0f}",
            f"{flops / 1e12:.3g}",
            f"{flops / peak:.1%}" if peak else "",
            f"{max(each['allocated'] for each in measured) / 1e9:.1f}",
            f"{max(each['reserved'] for each in measured) / 1e9:.1f}",
            f"{max(each['graphs'] for each in measured)}",
            ", ".join(f"{each['first']:.0f}" for each in measured),
            f"{measured[-1]['loss']:.4f}",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def flops(workload: Workload) -> float:
    """Returns the FLOPs of a step: 6 for each token and matmul weight, and half of attention's.

    The masked half of attention does not count, nor does recomputation in backward.
    """
    block = 4 * workload.hidden**2 + 3 * workload.hidden * workload.intermediate
    weights = workload.layers * block + workload.vocabulary * workload.hidden
    attention = workload.layers * workload.hidden * workload.sequence
    return 6 * (weights + attention) * workload.batch * workload.sequence


def _kernels(args: argparse.Namespace, results: dict, save: Callable[[], None]) -> None:
    _say(kernels.HEAD)
    results["kernels"] = []
    sizes = {"sizes": [1], "reference": 1, "repetitions": 3} if args.model == "tiny" else {}
    try:
        for row in kernels.measure(args.device, **sizes):
            results["kernels"].append(row)
            _say(kernels.line(row))
            save()
    except Exception as error:
        _say(f"\nthe copies failed: {type(error).__name__}: {error}")
        results["missing"].append("copies")
    _say("")


def _steps(
    args: argparse.Namespace, results: dict, save: Callable[[], None], deadline: float
) -> None:
    """Runs as many rounds of all modes as time allows; a mode that failed is not tried again.

    Every other round runs the modes in the opposite order, since a GPU is coolest at the start.
    """
    rounds: list[dict] = []
    results |= {"rounds": rounds, "overlap": {}}
    took: dict[str, float] = {}
    failed: set[str] = set()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cache = args.cache or Path(folder)
        for number in range(1, args.rounds + 1):
            rounds.append({})
            for mode in args.modes[:: 1 if number % 2 else -1]:
                if mode in failed:
                    continue
                start = time.monotonic()
                if deadline - start < took.get(mode, 0):
                    _say(f"round {number}, {mode}: there is no time for it")
                    results["missing"].append(f"round {number} of {mode}")
                    continue
                traced = number == 1 and mode in args.trace
                rounds[-1][mode] = found = _one(args, mode, str(cache / mode), traced, deadline)
                took[mode] = time.monotonic() - start
                save()
                if "steps" not in found:
                    failed.add(mode)
                    results["missing"].append(mode)
                    _say(f"round {number}, {mode}: {found['error']}")
                    continue
                _say(
                    f"round {number}, {mode}: {1e3 * median(found['steps']):.1f} ms a step, "
                    f"{found['first']:.0f} s the first; {took[mode]:.0f} s in all"
                )
                took[mode] -= 0.7 * found["first"]  # which compiles; later rounds find it on disk
                if traced:
                    _overlap(args, mode, found, results)
                    save()
            if rounds[-1]:
                _say(f"\n{table(results)}\n")


def _one(args: argparse.Namespace, mode: str, cache: str, traced: bool, deadline: float) -> dict:
    """Returns the measurements, or the error, of a new process that trains in one mode."""
    make = partial(Training, f"llama-{args.model}", mode, **_changes(args))
    ranks = Ranks(make, 1, cache)
    end = min(deadline, time.monotonic() + args.longest)
    found: dict = {}
    try:
        left = max(end - time.monotonic(), 1)
        found |= ranks.call("timed", args.warmup, args.steps, timeout=left)[0]
        if traced:
            left = max(end - time.monotonic(), 1)
            ranks.call("traced", str(_trace_path(args, mode)), timeout=left)
    except (EOFError, OSError, RuntimeError) as error:  # a TimeoutError is an OSError
        found["error"] = str(error) or "its process ended"
    finally:
        ranks.close()
    return found


def _overlap(args: argparse.Namespace, mode: str, measured: dict, results: dict) -> None:
    if "error" in measured:
        _say(f"{mode}: no trace: {measured['error']}")
        return
    try:
        trace = overlap.read(_trace_path(args, mode))
        found = overlap.summary(trace)
        if found is None:
            _say(f"{mode}: nothing ran on a GPU, there is nothing to draw")
            return
        results["overlap"][mode] = found
        _say(f"\n{overlap.table(mode, found)}\n")
        picture = args.output / f"overlap-{mode}.png"
        overlap.plot(trace, f"{mode}, llama-{args.model}: one step", picture)
        _say(f"{picture}, {_trace_path(args, mode)}")
    except Exception as error:
        _say(f"the trace of {mode} cannot be read: {type(error).__name__}: {error}")


def _trace_path(args: argparse.Namespace, mode: str) -> Path:
    return args.output / f"trace-{mode}.json.gz"


def _changes(args: argparse.Namespace) -> dict[str, object]:
    """Returns changes to the workload by the given arguments."""
    given = {name: getattr(args, name) for name in ("device", "layers", "batch", "sequence")}
    return {name: value for name, value in given.items() if value is not None}


def _about(workload: Workload, args: argparse.Namespace) -> dict:
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if gpu:
        versions += (
            f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        )
    shape = {name: str(value) for name, value in asdict(workload).items()}
    return {
        "command": command(),
        "machine": f"{gpu or platform.machine()}, {versions}",
        "time": now(),
        "gpu": gpu,
        "workload": shape,
        "modes": args.modes,
        "missing": [],
        "tokens": workload.batch * workload.sequence,
        "flops": flops(workload),
    }


def _say(text: str) -> None:
    """Prints at once, so that the output of a killed run is not lost."""
    print(text, flush=True)
