"""Everything that a machine with a GPU is needed for, in the order of its worth.

``python3 bench/on_gpu.py --minutes 8.7`` builds the runtime in place and runs the stages below. It
needs no network. Logs, numbers and pictures are in ``$OUT`` (``build/gpu/out`` without it) a second
after they are written, so that a killed run loses nothing. A second run skips what is complete.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
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
_PYTEST = f"TORCHINDUCTOR_COMPILE_THREADS=1 {_PYTHON} -m pytest -q --timeout 150 "
_SANITIZED = (
    "PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 "
    "--report-api-errors no --kernel-name kns=zero3 " + _PYTEST + "-p no:xdist "
)
_ONE_PROCESS = "tests/test_{ops,eager,hooks,contract_changes,grad_dtype_at_leaf}.py"
_BENCH = (
    f"{_PYTHON} -m bench gpu --output {KEPT}/$NAME --cache {KEPT}/compiled/${{NAME%%-*}} "
    "--longest 150 --minutes $MINUTES --parts "
)
_STEPS = _BENCH + "steps --rounds 2 --modes plain,zero3,fsdp2-blocks "
_OTHERS = _BENCH + "steps --rounds 1 --trace plain --modes "


@dataclass(frozen=True)
class Stage:
    """A command of the shell.

    Attributes:
        most: seconds after which it is killed.
        least: seconds without which it does not begin.
    """

    name: str
    most: float
    least: float
    command: str


# Stages of one list run side by side.
STAGES = [
    [Stage("machine", 30, 0, f"nvidia-smi; nvcc --version; {_PYTHON} -m pip list")],
    [Stage("build", 200, 60, _BUILD)],
    [
        Stage(
            "tests", 170, 60, _PYTEST + "-n 6 --dist loadgroup tests/test_{gpu,copy,cuda_build}.py"
        ),
        Stage("sanitizer", 120, 60, _SANITIZED + "tests/test_copy.py -m gpu"),
        Stage("one-process", 170, 60, f"{_PYTEST} -n 5 --device cuda -m 'not long' {_ONE_PROCESS}"),
    ],
    [Stage("kernels", 60, 25, _BENCH + "kernels")],
    [Stage("1b", 290, 120, _STEPS)],
    [Stage("3b", 290, 100, _STEPS + "--model 3b --steps 8")],
    [Stage("regions", 90, 60, _OTHERS + "zero3,without-regions --layers 8 --steps 2")],
    [Stage("1b-others", 240, 70, _OTHERS + "plain,zero3-blocks,fsdp2-model,zero3-again")],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.7, help="for all stages (8.7)")
    parser.add_argument(
        "--stages",
        type=lambda names: names.split(","),
        metavar="S,...",
        help="run these, complete or not",
    )
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    for folder in (KEPT, OUT):
        folder.mkdir(parents=True, exist_ok=True)
    done = json.loads(SUMMARY.read_text())["stages"] if SUMMARY.exists() else {}
    env = environment()
    for group in STAGES:
        left = end - time.monotonic()
        chosen = args.stages or [s.name for s in group if not done.get(s.name, {}).get("complete")]
        todo = [stage for stage in group if stage.name in chosen and left >= stage.least]
        run(todo, left, done, env)
        save(done, pack=bool(todo))
        if any(stage.name == "build" for stage in todo) and not done["build"]["complete"]:
            sys.exit((KEPT / "build.log").read_text()[-SHOWN:])
    print(SUMMARY.read_text()[-SHOWN:])


def environment() -> dict[str, str]:
    """Returns the environment of the stages: where CUDA is, and what keeps to this machine."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda", *Path("/usr/local").glob("cuda-*"))
    home = Path(next(each for each in homes if each and Path(each, "bin", "nvcc").exists()))
    packages = Path(sysconfig.get_path("purelib"))
    wheel = next(packages.glob("nvidia/cu1*"), home)
    links = KEPT / "lib"
    links.mkdir(exist_ok=True)
    link = links / "libcudart.so"
    if not (home / "lib64" / link.name).exists() and not link.exists():
        link.symlink_to(next((wheel / "lib").glob("libcudart.so.*")))  # torch's has no other name
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{home}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "CUDA_HOME": str(home),
        "CPATH": f"{wheel}/include",
        "LIBRARY_PATH": f"{links}:{wheel}/lib",
        "ZERO3_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "TORCHINDUCTOR_CACHE_DIR": f"{KEPT}/compiled/tests",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }


def run(stages: list[Stage], left: float, done: dict[str, dict], env: dict[str, str]) -> None:
    """Runs ``stages`` side by side for ``left`` seconds at most, and adds them to ``done``."""
    start = time.monotonic()
    running: list[tuple[Stage, float, subprocess.Popen]] = []
    for stage in stages:
        if (KEPT / stage.name).exists():
            (KEPT / stage.name).rename(KEPT / f"{stage.name}.{time.time():.0f}")
        limit = min(stage.most, left)
        of_stage = {"NAME": stage.name, "MINUTES": f"{(limit - 8) / 60:.2f}"}
        with (KEPT / f"{stage.name}.log").open("w") as log:
            process = subprocess.Popen(
                ["bash", "-c", stage.command],
                cwd=ROOT,
                env=env | of_stage,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        running.append((stage, limit, process))
    while running:
        time.sleep(1)
        for each in list(running):
            stage, limit, process = each
            seconds = time.monotonic() - start
            if process.poll() is None and seconds > limit:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.returncode is None:
                continue
            running.remove(each)
            text = (KEPT / f"{stage.name}.log").read_text(errors="replace")
            was_cut = "there is no time" in text or "did not answer" in text
            # Tests that fail do not run again by themselves, a build does.
            complete = process.returncode == 0 or (process.returncode > 0 and stage.name != "build")
            done[stage.name] = {
                "status": process.returncode,
                "complete": complete and not was_cut,
                "seconds": round(seconds),
            }
        save(done)


def save(done: dict[str, dict], pack: bool = False) -> None:
    """Writes the summary and all logs; with ``pack``, an archive of all results too."""
    written = SUMMARY.with_suffix(".new")
    written.write_text(json.dumps({"stages": done, "numbers": numbers()}, indent=1))
    shutil.copy(written.replace(SUMMARY), OUT)
    logs = sorted(KEPT.glob("*.log"), key=os.path.getmtime)
    texts = [f"\n== {log.stem}\n{log.read_text(errors='replace')}" for log in logs]
    (OUT / "log.txt").write_text("".join(texts))
    if pack:
        with tarfile.open(OUT / "results.tar.gz", "w:gz") as archive:
            for suffix in ("json", "json.gz", "png"):
                for path in KEPT.glob(f"*/*.{suffix}"):
                    archive.add(path, path.relative_to(KEPT))


def numbers() -> dict[str, dict]:
    """Returns, for each stage that measures, what is asked for: see docs/gpu.md."""
    found: dict[str, dict] = {}
    for path in sorted(KEPT.glob("*/gpu.json")):
        with contextlib.suppress(ValueError):  # half written
            found[path.parent.name] = _numbers_of(json.loads(path.read_text()))
    return found


def _numbers_of(results: dict) -> dict:
    large = [row["of_plain"] for row in results.get("kernels", ()) if row["mib"] >= 64]
    found: dict = {"slowest copy, of a plain copy": min(large)} if large else {}
    for each in results.get("rounds", ()):
        ms = {mode: 1e3 * median(of["steps"]) for mode, of in each.items() if "steps" in of}
        for mode in ms:
            ratios = {
                f"over {base}": round(ms[mode] / ms[base], 4)
                for base in ("plain", "fsdp2-blocks")
                if base in ms
            }
            fields = {key: each[mode][key] for key in ("first", "loss")}
            fields |= {"ms": round(ms[mode], 2), "GB": each[mode]["allocated"] / 1e9}
            found.setdefault(mode, []).append(fields | ratios)
    if "overlap" in results:
        found["host waits"] = {mode: of["waits"] for mode, of in results["overlap"].items()}
    return found


if __name__ == "__main__":
    main()
