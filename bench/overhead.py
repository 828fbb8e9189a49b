"""Measures the overhead of a step: many parameters, hardly any work, one rank."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from bench.command_line import print_table
from deepcompile_zero3 import fully_shard

LAYERS = 150  # each with a weight and a bias
WIDTH = 8


def add_arguments(part: argparse.ArgumentParser) -> None:
    """:func:`run` has no arguments."""


def run(args: argparse.Namespace) -> None:
    """Times a step of 300 small parameters on one rank, sharded and unsharded."""
    with tempfile.TemporaryDirectory() as folder:
        medians = measure(f"{folder}/store")
    base = next(iter(medians.values()))
    lines = ["| 300 parameters | ms a step | more, µs a parameter |", "| --- | ---: | ---: |"]
    for name, seconds in medians.items():
        lines.append(f"| {name} | {seconds * 1e3:.2f} | {(seconds - base) / 300 * 1e6:.1f} |")
    print_table(lines, "1 rank")


def measure(store: str, rounds: int = 200) -> dict[str, float]:
    """Returns median seconds of a forward and backward of 300 small parameters, by mode."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    x = torch.randn(2, WIDTH)
    modes = {
        "stock torch.compile, not sharded": torch.compile(_model()),
        "zero3, gathered again": _sharded(reshard_after_forward=True),
        "zero3, kept": _sharded(reshard_after_forward=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(rounds + 5):
        for name, run in modes.items():
            seconds[name].append(_step(run, x))
    dist.destroy_process_group()
    return {name: statistics.median(values[5:]) for name, values in seconds.items()}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _sharded(**settings: bool) -> Callable:
    return torch.compile(fully_shard(_model(), **settings), backend="zero3")


def _step(run: Callable, x: torch.Tensor) -> float:
    start = time.perf_counter()
    run(x).sum().backward()
    elapsed = time.perf_counter() - start
    for parameter in run.parameters():  # type: ignore[attr-defined]
        parameter.grad = None
    return elapsed
