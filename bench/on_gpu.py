"""Builds, tests and measures on a machine with a GPU, within minutes.

``python3 bench/on_gpu.py --minutes 8.7`` builds the runtime in place and runs the stages below, the
most valuable first. It needs no network. Logs and numbers are in ``$OUT`` (``build/gpu/out``
without it) within a second, so that a killed run loses nothing. A second run on the same machine
skips the stages that are complete.
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "build" / "gpu"
OUT = Path(os.environ.get("OUT", KEPT / "out"))
SUMMARY = KEPT / "summary.json"
SHOWN = 8000  # characters of a summary or a log that are printed

_PYTHON = sys.executable
_CHECK = (
    "import torch, importlib.metadata as m; from deepcompile_zero3.runtime import _C; "
    "assert _C.WITH_CUDA and torch.cuda.is_available(); "
    "assert 'zero3' in m.entry_points(group='torch_dynamo_backends').names"
)
_BUILD = f'{_PYTHON} setup.py egg_info build_ext --inplace && {_PYTHON} -c "{_CHECK}"'
_PYTEST = f"{_PYTHON} -m pytest -q --timeout "
_ONE_THREAD = "export TORCHINDUCTOR_COMPILE_THREADS=1 PYTORCH_NO_CUDA_MEMORY_CACHING="
_SANITIZER = (
    "compute-sanitizer --tool memcheck --error-exitcode 1 --report-api-errors no "
    "--kernel-name kns=zero3 "
)
_TESTS = (
    "tests/runtime/test_{gpu,copy,cuda_build}.py tests/features/offload/test_gpu_activations.py"
)
_ONE_PROCESS = (
    "tests/runtime/test_ops.py tests/sharding/test_{eager,hooks}.py "
    "tests/contract/test_{contract_changes,grad_dtype_at_leaf}.py"
)
_BENCH = f"{_PYTHON} -m bench gpu --output {KEPT}/$NAME --longest 150 --minutes $MINUTES --parts "
_STEPS = f"{_BENCH}steps --cache {KEPT}/compiled/steps --modes plain,zero3,fsdp2-blocks --rounds "
_OTHERS = _BENCH + "steps --rounds 1 --trace plain --modes "


@dataclass(frozen=True)
class Stage:
    """A command of the shell.

    Attributes:
        most: seconds after which it is killed.
        least: seconds without which it does not begin.
        may_fail: whether it is complete with exit status 1: with tests that fail.
    """

    name: str
    most: float
    least: float
    command: str
    may_fail: bool = False


# Stages of one list run side by side.
STAGES = [
    [Stage("machine", 30, 0, f"nvidia-smi; nvcc --version; {_PYTHON} -m pip list")],
    [Stage("build", 200, 30, _BUILD)],
    [
        Stage(
            "tests",
            most=170,
            least=60,
            command=f"{_ONE_THREAD}0; {_PYTEST}150 -n 6 --dist worksteal {_TESTS}",
            may_fail=True,
        ),
        Stage(
            "sanitizer",
            most=120,
            least=60,
            command=f"{_ONE_THREAD}1; {_SANITIZER}{_PYTEST}100 -p no:xdist "
            "tests/runtime/test_copy.py -m gpu",
        ),
        Stage(
            "one-process",
            most=170,
            least=60,
            command=f"{_ONE_THREAD}0; {_PYTEST}150 -n 5 --device cuda -m 'not long' {_ONE_PROCESS}",
            may_fail=True,
        ),
        # Compiles what the next stages load. Tests run beside it, so its times do not count.
        Stage("compile", 230, 60, _STEPS + "1 --steps 1 --warmup 1 --trace plain"),
    ],
    [Stage("kernels", 60, 25, _BENCH + "kernels")],
    [Stage("1b", 290, 60, _STEPS + "2")],
    [Stage("3b", 290, 190, _STEPS + "2 --model 3b --steps 8")],
    [Stage("regions", 90, 60, _OTHERS + "zero3,without-regions --layers 8 --steps 2")],
    [Stage("1b-others", 240, 70, _OTHERS + "plain,zero3-blocks,fsdp2-model,zero3-again")],
]


def main() -> None:
    names = [stage.name for group in STAGES for stage in group]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.7, help="for all stages (8.7)")
    parser.add_argument(
        "--stages", nargs="+", choices=names, metavar="S", help="run these, complete or not"
    )
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    for folder in (KEPT, OUT):
        folder.mkdir(parents=True, exist_ok=True)
    done = json.loads(SUMMARY.read_text())["stages"] if SUMMARY.exists() else {}
    env = environment()
    chosen = args.stages or [n for n in names if not done.get(n, {}).get("complete")]
    for group in STAGES:
        left = end - time.monotonic()
        # The build is incremental, and the others need that of these sources.
        todo = [s for s in group if s.name in [*chosen, "build"] and left >= s.least]
        run(todo, left, done, env)
        save(done, pack=bool(todo))
        is_built = done.get("build", {}).get("complete")
        if group[0].name == "build" and not (todo and is_built):
            log = KEPT / "build.log"
            sys.exit(log.read_text(errors="replace")[-SHOWN:] if todo else "no time to build")
    print(SUMMARY.read_text()[-SHOWN:])


def environment() -> dict[str, str]:
    """Returns the environment of the stages: where CUDA is, and what keeps to this machine."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda", *Path("/usr/local").glob("cuda-*"))
    found = (Path(home) for home in homes if home and Path(home, "bin", "nvcc").exists())
    home = next(found, None)
    if home is None:
        sys.exit("no bin/nvcc in CUDA_HOME or /usr/local/cuda: set CUDA_HOME")
    packages = Path(sysconfig.get_path("purelib"))
    wheel = next(packages.glob("nvidia/cu1*"), home)
    links = KEPT / "lib"
    links.mkdir(exist_ok=True)
    link = links / "libcudart.so"
    link.unlink(missing_ok=True)
    for library in (wheel / "lib").glob("libcudart.so.*"):  # torch's has no other name
        link.symlink_to(library)
        break
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{home}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "CUDA_HOME": str(home),
        "CPATH": f"{wheel}/include",
        "LIBRARY_PATH": f"{links}:{wheel}/lib",
        # Some compilers come with a static library only, and a second one crashes beside torch's.
        "LDFLAGS": "-Wl,--push-state,--no-as-needed,-l:libstdc++.so.6,--pop-state",
        "ZERO3_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": "9.0",  # H100 and H200
        "TORCHINDUCTOR_CACHE_DIR": f"{KEPT}/compiled/tests",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }


def run(stages: list[Stage], left: float, done: dict[str, dict], env: dict[str, str]) -> None:
    """Runs ``stages`` side by side for ``left`` seconds at most, and adds them to ``done``."""
    start = time.monotonic()
    running: dict[Stage, subprocess.Popen] = {}
    try:
        for stage in stages:
            running[stage] = _start(stage, min(stage.most, left), env)
        while running:
            time.sleep(1)
            seconds = time.monotonic() - start
            for stage, process in list(running.items()):
                if process.poll() is None and seconds <= min(stage.most, left):
                    continue
                _kill(process)
                del running[stage]
                done[stage.name] = {
                    "status": process.returncode,
                    "complete": process.returncode in (0, int(stage.may_fail)),
                    "seconds": round(seconds),
                }
            save(done)
    finally:
        for process in running.values():
            _kill(process)


def _start(stage: Stage, limit: float, env: dict[str, str]) -> subprocess.Popen:
    folder, log = KEPT / stage.name, KEPT / f"{stage.name}.log"
    if folder.exists():  # of an earlier try
        folder.rename(f"{folder}.{time.time():.0f}")
    with log.open("a") as output:
        return subprocess.Popen(
            ["bash", "-c", stage.command],
            cwd=ROOT,
            env=env | {"NAME": stage.name, "MINUTES": f"{(limit - 8) / 60:.2f}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def _kill(process: subprocess.Popen) -> None:
    """Kills the process and what it has started, some of which may have outlived it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def save(done: dict[str, dict], pack: bool = False) -> None:
    """Writes the summary and all logs; with ``pack``, archives of all results too."""
    summary = json.dumps({"stages": done, "numbers": numbers()}, indent=1)
    logs = sorted(KEPT.glob("*.log"), key=os.path.getmtime)
    texts = [f"\n== {log.stem}\n{log.read_text(errors='replace')}" for log in logs]
    for path, text in ((SUMMARY, summary), (OUT / "summary.json", summary)):
        _replace(path, lambda new, text=text: new.write_text(text))
    _replace(OUT / "log.txt", lambda new: new.write_text("".join(texts)))
    if pack:
        stages = [stage.name for group in STAGES for stage in group]
        found = [path for name in stages for path in KEPT.glob(f"{name}*/*.*")]
        traces = [path for path in found if path.suffix == ".gz"]
        results = [path for path in found if path.suffix in (".json", ".png")]
        _replace(OUT / "results.tar.gz", functools.partial(_pack, results))
        _replace(OUT / "traces.tar.gz", functools.partial(_pack, traces))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Replaces ``path`` at once by what ``write`` writes, so that a kill leaves a whole file."""
    new = path.with_name(f"{path.name}.new")
    write(new)
    new.replace(path)


def _pack(paths: list[Path], archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        for path in paths:
            tar.add(path, path.relative_to(KEPT))


def numbers() -> dict[str, dict]:
    """Returns, for each stage that measures, what is asked for: see docs/gpu_measurements.md."""
    found: dict[str, dict] = {}
    for path in sorted(KEPT.glob("*/gpu.json")):
        with contextlib.suppress(ValueError):  # half written
            found[path.parent.name] = _numbers_of(json.loads(path.read_text()))
    return found


def _numbers_of(results: dict) -> dict:
    large = [row["of_plain"] for row in results.get("kernels", ()) if row["mib"] >= 64]
    found: dict = {"slowest copy, of a plain copy": min(large)} if large else {}
    for modes in results.get("rounds", ()):
        ms = {mode: 1e3 * median(run["steps"]) for mode, run in modes.items() if "steps" in run}
        for mode in ms:
            measured = {"ms": round(ms[mode], 2), "GB": modes[mode]["allocated"] / 1e9}
            measured |= {key: modes[mode][key] for key in ("first", "loss")}
            for base in ("plain", "fsdp2-blocks"):
                if base in ms:
                    measured[f"over {base}"] = round(ms[mode] / ms[base], 4)
            found.setdefault(mode, []).append(measured)
    if "overlap" in results:
        found["host waits"] = {mode: step["waits"] for mode, step in results["overlap"].items()}
    return found


if __name__ == "__main__":
    main()
