"""The benchmark runs, and reports what it ran."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_modes_step_in_turn_and_are_compared_with_the_floor(tmp_path):
    pytest.importorskip("matplotlib")
    run = bench(
        *("-w", "tiny", "-m", "floor,zero3-eager,fsdp2-eager", "--rounds", 2, "--warmup", 1),
        *("--output", tmp_path),
    )

    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / "tiny.json").read_text())
    assert {name: len(mode["steps"]) for name, mode in results["modes"].items()} == {
        "floor": 2,
        "zero3-eager": 2,
        "fsdp2-eager": 2,
    }
    sent = {name: mode["collectives"] for name, mode in results["modes"].items()}
    assert sent["floor"] == {}
    # All gradients, once; ours counted by the runtime, FSDP2's by the profiler.
    assert sent["zero3-eager"]["reduce_scatter"][1] == sent["fsdp2-eager"]["reduce_scatter"][1]
    assert "| fsdp2-eager |" in run.stdout
    assert (tmp_path / "steps-default-malloc.png").stat().st_size > 0


def test_an_unknown_mode_is_refused_with_those_that_there_are():
    run = bench("-m", "zero4")

    assert run.returncode == 2
    assert "zero4 is not among floor, zero3" in run.stderr
