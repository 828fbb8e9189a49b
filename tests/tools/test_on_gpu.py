"""``bench/on_gpu.py`` goes on after a kill, and leaves nothing running."""

import json
import os
import subprocess
import sys
import tarfile
import time

import pytest
from support.paths import ROOT

sys.path.append(str(ROOT))  # the last: an installed package comes first

from bench import on_gpu
from bench.on_gpu import Stage

_RESULTS = {
    "kernels": [
        {"mib": 4, "of_plain": 0.5},
        {"mib": 64, "of_plain": 0.9},
        {"mib": 256, "of_plain": 0.88},
    ],
    "rounds": [
        {
            "plain": {"steps": [0.1, 0.2, 0.1], "first": 30, "loss": 2.5, "allocated": 45e9},
            "zero3": {"steps": [0.102] * 3, "first": 40, "loss": 2.51, "allocated": 44e9},
            "fsdp2-blocks": {"error": "its process ended"},
        }
    ],
    "overlap": {"zero3": {"waits": {"cudaStreamSynchronize": 2}}},
}


@pytest.fixture
def spend(tmp_path, monkeypatch):
    """Returns ``spend(stages, *arguments)``, which runs them and returns their summary."""
    kept, out = tmp_path / "kept", tmp_path / "out"
    monkeypatch.setattr(on_gpu, "KEPT", kept)
    monkeypatch.setattr(on_gpu, "OUT", out)
    monkeypatch.setattr(on_gpu, "SUMMARY", kept / "summary.json")
    monkeypatch.setattr(on_gpu, "environment", lambda: {"PATH": "/usr/bin:/bin", "KEPT": str(kept)})

    def run(stages, *arguments):
        monkeypatch.setattr(on_gpu, "STAGES", stages)
        monkeypatch.setattr(sys, "argv", ["on_gpu.py", *arguments])
        on_gpu.main()
        return json.loads((out / "summary.json").read_text())

    return run


def test_a_second_run_takes_up_what_is_not_complete(spend, tmp_path):
    count = 'echo $NAME >>"$KEPT/ran"; '
    stages = [
        [Stage("quick", 10, 0, count + "echo quick as a flash")],
        [
            Stage("slow", 1, 0, count + "sleep 60"),
            Stage("failing", 10, 0, count + "exit 1", may_fail=True),
            Stage("cut", 10, 0, count + "exit 1"),
        ],
    ]
    start = time.monotonic()
    done = spend(stages)["stages"]
    assert time.monotonic() - start < 30
    assert {name: stage["complete"] for name, stage in done.items()} == {
        "quick": True,
        "slow": False,
        "failing": True,  # tests that fail fail again
        "cut": False,
    }
    assert done["failing"]["status"] == 1
    assert "quick as a flash" in (tmp_path / "out" / "log.txt").read_text()

    spend(stages)
    ran = (tmp_path / "kept" / "ran").read_text().split()
    assert sorted(ran) == ["cut", "cut", "failing", "quick", "slow", "slow"]

    spend(stages, "--stages", "quick")
    assert (tmp_path / "kept" / "ran").read_text().split()[-1] == "quick"


def test_a_script_that_is_stopped_stops_its_stages(tmp_path):
    program = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bench import on_gpu
on_gpu.KEPT = on_gpu.OUT = Path(sys.argv[2])
on_gpu.SUMMARY = on_gpu.KEPT / "summary.json"
on_gpu.environment = lambda: {"PATH": "/usr/bin:/bin"}
write = f"echo $$ >{sys.argv[2]}/new; mv {sys.argv[2]}/new {sys.argv[2]}/pid"
on_gpu.STAGES = [[on_gpu.Stage("endless", 60, 0, f"{write}; sleep 60")]]
sys.argv[1:] = []
on_gpu.main()
"""
    root = str(ROOT)
    process = subprocess.Popen([sys.executable, "-c", program, root, tmp_path], cwd=tmp_path)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 30
    while not pid.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(10) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    "stage", [s for group in on_gpu.STAGES for s in group], ids=lambda s: s.name
)
def test_the_commands_are_those_of_a_shell(stage):
    echoed = stage.command.replace("compute-sanitizer", "echo compute-sanitizer")
    for program in ("nvidia-smi", "nvcc", sys.executable):
        echoed = echoed.replace(program, f"echo {program}")
    ran = subprocess.run(
        ["bash", "-c", echoed],
        env={"PATH": "/usr/bin:/bin", "NAME": stage.name, "MINUTES": "1.00"},
        cwd=on_gpu.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    if stage.name == "sanitizer":
        assert f"--kernel-name kns=zero3 {sys.executable} -m pytest" in stage.command
    assert "-m bench gpu" not in ran.stdout or f"/{stage.name} " in ran.stdout


def test_nothing_follows_a_build_that_fails(spend, tmp_path, capsys):
    stages = [[Stage("build", 10, 0, "echo no compiler; exit 1")], [Stage("tests", 10, 0, "true")]]
    with pytest.raises(SystemExit, match="no compiler"):
        spend(stages)
    assert [*json.loads((tmp_path / "out" / "summary.json").read_text())["stages"]] == ["build"]


def test_a_stage_without_time_for_it_does_not_begin(spend):
    assert spend([[Stage("long", 90, 60, "true")]], "--minutes", "0.5")["stages"] == {}


def test_measurements_become_the_numbers_that_are_asked_for(spend, tmp_path):
    write = f"mkdir -p $KEPT/$NAME; cat >$KEPT/$NAME/gpu.json <<'E'\n{json.dumps(_RESULTS)}\nE"
    assert spend([[Stage("1b", 10, 0, write)]])["numbers"]["1b"] == {
        "slowest copy, of a plain copy": 0.88,
        "plain": [{"first": 30, "loss": 2.5, "ms": 100.0, "GB": 45.0, "over plain": 1.0}],
        "zero3": [{"first": 40, "loss": 2.51, "ms": 102.0, "GB": 44.0, "over plain": 1.02}],
        "host waits": {"zero3": {"cudaStreamSynchronize": 2}},
    }
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as archive:
        assert "1b/gpu.json" in archive.getnames()
