"""Installs a wheel beside each torch, in an environment without a compiler, and trains:

python bench/wheels.py dist/*.whl 2.11.0 2.12.1       # an environment of torch after the other

Prints the size of each runtime, and the seconds from the start of `pip install` to the end of the
first step of two ranks. Only Inductor gets a compiler.
"""

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

# What becomes of a sharded model, by the name of the way.
WAYS = {
    "eager": lambda model: model,
    "op by op": lambda model: torch.compile(model, backend="zero3", options={"inductor": False}),
    "Inductor": lambda model: torch.compile(model, backend="zero3"),
}
FIRST = "the first step ended at "
HEADER = f"| torch | Python | runtime, MB | installed, s | {' | '.join(WAYS)} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("wheel", type=Path)
    arguments.add_argument("torch", nargs="*")
    arguments.add_argument("--train", choices=WAYS, help=argparse.SUPPRESS)  # as one of the ranks
    args = arguments.parse_args()
    if args.train:
        train(args.train)
        return
    print(f"{args.wheel.name}: {args.wheel.stat().st_size / 1e6:.2f} MB", HEADER, sep="\n\n")
    print("|---|---|" + "---:|" * (2 + len(WAYS)), flush=True)
    for version in args.torch:
        with tempfile.TemporaryDirectory(dir="build", prefix="wheel-") as folder:
            print(row(args.wheel.absolute(), version, Path(folder).absolute()), flush=True)


def row(wheel: Path, version: str, folder: Path) -> str:
    """Returns a row of the table, for a version of torch."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    paths = {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | paths
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    without_compiler = variables | {"PATH": f"{folder}/bin"}
    pip = [python, "-m", "pip", "install", "--quiet"]
    call([*pip, f"torch=={version}", "numpy"], folder, variables)

    began = time.time()
    call([*pip, str(wheel)], folder, without_compiler)
    installed = time.time() - began
    ranks = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    cells = []
    for way in WAYS:
        command = [python, *ranks, "--nproc-per-node", "2", __file__, str(wheel), "--train", way]
        began = time.time()
        told = call(command, folder, variables if way == "Inductor" else without_compiler)
        ended = float(told.split(FIRST)[1].split()[0])
        cells.append(f"{installed + ended - began:.0f}")
    [runtime] = folder.glob(f"lib/*/site-packages/{told.split()[0]}")
    python_version = ".".join(map(str, sys.version_info[:2]))
    size = f"{runtime.stat().st_size / 1e6:.1f}"
    return f"| {version} | {python_version} | {size} | {installed:.0f} | {' | '.join(cells)} |"


def call(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    run = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=1800
    )
    if run.returncode:
        sys.exit(f"{' '.join(command)}: {run.stdout}{run.stderr}")
    return run.stdout


def train(way: str) -> None:
    """Trains one of two ranks, and compares with training in one process."""
    from deepcompile_zero3 import fully_shard  # of the wheel
    from deepcompile_zero3.runtime import _C

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    whole = copy.deepcopy(model)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = torch.randn(8, 64)

    ended = []
    for parameters, run, inputs in (
        (model.parameters(), WAYS[way](model), batch.chunk(2)[dist.get_rank()]),
        (whole.parameters(), whole, batch),
    ):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(3):
            run(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ended.append(time.time())
    for sharded, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), expected)
    if dist.get_rank() == 0:
        file = Path(_C.__file__)
        print(file.relative_to(file.parents[3]), f"{FIRST}{ended[0]}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
