"""The benchmark runs, and reports what it ran."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
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


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_deepspeed_reduces_all_gradients_once_and_their_norm(tmp_path):
    pytest.importorskip("matplotlib")
    run = bench(
        *("-w", "tiny", "-m", "zero3-eager,deepspeed", "--rounds", 1, "--warmup", 1),
        *("--output", tmp_path),
    )

    assert run.returncode == 0, run.stderr
    modes = json.loads((tmp_path / "tiny.json").read_text())["modes"]
    sent = modes["deepspeed"]["collectives"]
    assert sent["reduce_scatter"][1] == modes["zero3-eager"]["collectives"]["reduce_scatter"][1]
    assert sent["all_reduce"] == [1, 8]  # a double
    assert sent["all_gather"][1] >= sent["reduce_scatter"][1]


def test_deepspeed_is_a_mode_only_where_it_is_installed():
    assert ("mode deepspeed" in bench("--help").stdout) == (find_spec("deepspeed") is not None)


def test_an_unknown_mode_is_refused_with_those_that_there_are():
    run = bench("-m", "zero4")

    assert run.returncode == 2
    assert "zero4 is not among floor, zero3" in run.stderr
