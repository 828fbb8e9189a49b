"""``python -m deepcompile_zero3 doctor``: checks the installation and takes a two-rank step."""

import copy
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import deepcompile_zero3
from deepcompile_zero3 import torch_release
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.guides import Guide
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.module_parameters import all_parameters_of
from deepcompile_zero3.tools.progress import Tell, progress, say_nothing
from deepcompile_zero3.torch_internals import dynamo_runs

_TIMEOUT = datetime.timedelta(seconds=180)
_OPTIONAL = ("transformers", "plotly", "matplotlib")  # for plans of configs, pages and pictures
_STAGE = ".stage"  # a file with what the ranks do
_SLOW = (
    "a busy machine needs longer; ranks that wait for each other for ever may use the wrong "
    "network: GLOO_SOCKET_IFNAME=lo"
)


class Finding(NamedTuple):
    """A checked item, what was found and, if something is wrong, a remedy."""

    what: str
    found: str
    remedy: str = ""


def main() -> int:
    """Prints the findings and returns the number of those that need a remedy."""
    ways = {"two ranks, eager": _eager, "two ranks, compiled": _compiled}
    with progress() as tell:
        tell("looking at what is installed")
        findings = [*_installed(), *try_steps(ways, tell)]
    table = Table(box=None, pad_edge=False, show_header=False)
    for style in ("bold", "", "red"):
        table.add_column(style=style, overflow="fold")
    for finding in findings:
        table.add_row(*map(escape, finding))
    Console(emoji=False).print(table, highlight=False)
    wrong = sum(bool(finding.remedy) for finding in findings)
    if wrong:
        print(f"See {Guide.INSTALLATION}")
    return wrong


def _installed() -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("torch", f"{torch.__version__} (tried: {', '.join(torch_release.TRIED)})")
    yield Finding("torch's private pieces", "all there")  # else the import above raises
    yield Finding("deepcompile_zero3", deepcompile_zero3.__version__)
    lacks_cuda = torch.cuda.is_available() and not _C.WITH_CUDA
    yield Finding(
        "runtime",
        f"{Path(_C.__file__).name}, for {'CPUs and GPUs' if _C.WITH_CUDA else 'CPUs'}",
        f"build it with a CUDA toolkit: ZERO3_CUDA=1 CUDA_HOME=... See {Guide.CUDA}"
        if lacks_cuda
        else "",
    )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding("GPUs", ", ".join(gpus) or "none")
    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    remedy = "" if "gloo" in backends else "torch needs gloo"
    yield Finding("process groups", ", ".join(backends), remedy)
    command = os.environ.get("CXX", "g++").strip()
    path = shutil.which(shlex.split(command)[0]) if command else None
    cure = "install g++" if command else "unset CXX, which is empty"
    remedy = "" if path else f"Inductor needs one: {cure}"
    yield Finding("C++ compiler", path or f"no {command or 'compiler'}", remedy)
    yield Finding("optional", ", ".join(f"{name} {_version_of(name)}" for name in _OPTIONAL))


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not there"


def _eager(model: nn.Module) -> Callable:
    return model


def _compiled(model: nn.Module) -> Callable:
    # Into an empty folder, where Inductor also finds out what the C++ compiler can do.
    compiled = torch.compile(model, backend="zero3")

    def run(batch: torch.Tensor) -> torch.Tensor:
        before = dynamo_runs.count_of_graphs()
        output = compiled(batch)
        if dynamo_runs.count_of_graphs() == before:
            why = dynamo_runs.why_not_compiled() or "torch does not say why"
            raise Zero3Error(f"no graph was compiled: {why}")
        return output

    return run


def try_steps(ways: Mapping[str, Callable], tell: Tell = say_nothing) -> Iterator[Finding]:
    """Yields whether two ranks take a correct step of ``way(model)``, for each way until one fails.

    Args:
        ways: by what findings call them.
        tell: called with each stage as it begins.
    """
    with tempfile.TemporaryDirectory() as folder:
        problem = _run_ranks(folder, ways, tell)
        for what in ways:
            found = Path(folder, what)
            if not found.exists():
                yield Finding(what, *problem)
                break
            yield Finding(what, found.read_text())


def _run_ranks(folder: str, ways: Mapping[str, Callable], tell: Tell) -> tuple[str, str]:
    """Runs two ranks, and returns the problem and the remedy of one that did not take a step."""
    tell("starting two processes, each of which imports torch and its compiler")
    stage = Path(folder, _STAGE)
    context = mp.spawn(_steps, args=(2, folder, ways), nprocs=2, join=False)
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    try:
        while not context.join(timeout=1):
            if stage.exists():
                tell(stage.read_text())
                stage.unlink()
            if time.monotonic() > deadline:
                return f"no step in {_TIMEOUT.total_seconds():g} s", _SLOW
        return "ended without a step", ""
    except Exception as error:
        print(error, file=sys.stderr)
        causes = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", str(error), re.MULTILINE)
        return "failed", causes[-1] if causes else str(error)
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _steps(rank: int, world_size: int, folder: str, ways: Mapping[str, Callable]) -> None:
    """Takes a step in each way, and writes a file about each that was right."""
    torch.set_num_threads(1)
    # An empty cache: code that was compiled earlier does not test this machine.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"
    store = dist.FileStore(f"{folder}/store", world_size)
    store.set_timeout(_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        for what, way in ways.items():
            if rank == 0:
                _begin(folder, f"taking a step: {what}")
            shares = _step(rank, world_size, way)
            dist.barrier()  # it was right on all ranks
            transport = "in memory that they share" if shares else "by messages"
            if rank == 0:
                Path(folder, what).write_text(f"a step is right, {transport}")
    finally:
        dist.destroy_process_group()


def _begin(folder: str, stage: str) -> None:
    """Lets the process that waits for the ranks know what they do."""
    written = Path(folder, f"{_STAGE}.new")
    written.write_text(stage)
    written.rename(Path(folder, _STAGE))  # at once, for who reads it


def _step(rank: int, world_size: int, way: Callable) -> bool:
    """Compares gradients with those of one process, and returns whether the ranks share memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    reference = copy.deepcopy(model)
    batch = torch.randn(2 * world_size, 16)
    deepcompile_zero3.fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    way(model)(batch.chunk(world_size)[rank]).square().mean().backward()
    reference(batch).square().mean().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(sharded.grad, DTensor)
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)
    return not all_parameters_of(model, "doctor")[0].handle.can.sends_messages
