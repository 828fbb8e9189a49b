"""The README's script, with this library and with FSDP2."""

import os
import re
import subprocess
import sys

import pytest
from support.paths import ROOT

CHANGED = re.compile(r"^(?P<line>.*?)  # FSDP2: (?P<fsdp2>.*)$", re.MULTILINE)


def _script():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if "torchrun" in block)


def _as_fsdp2(match):
    name, assigned, _ = match["line"].partition(" = ")
    return f"{name} = {match['fsdp2']}" if assigned else match["fsdp2"]


def _losses(script, folder):
    """Returns the losses of each rank, step by step."""
    path = folder / "train.py"
    path.write_text(script)
    ranks = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *ranks, path],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = re.findall(r"rank (\d): (\d+\.\d{4})", run.stdout)
    return [[float(loss) for rank, loss in found if rank == wanted] for wanted in "01"]


@pytest.mark.long
def test_the_script_trains(tmp_path):
    """Runs without Inductor, which would take most of the time."""
    script, changed = re.subn(
        r'(backend="zero3")\)', r'\1, options={"inductor": False})', _script()
    )
    assert changed == 1
    _check(_losses(script, tmp_path))


@pytest.mark.inductor
@pytest.mark.long
def test_the_script_and_the_fsdp2_script_that_it_was_have_the_same_losses(tmp_path):
    ours = _script()
    theirs, changed = CHANGED.subn(_as_fsdp2, ours)
    assert changed == 2
    assert "zero3" not in theirs
    losses = _losses(ours, tmp_path)
    _check(losses)
    for of_rank, expected in zip(losses, _losses(theirs, tmp_path), strict=True):
        assert of_rank == pytest.approx(expected, rel=1e-3)


def _check(losses):
    assert [len(of_rank) for of_rank in losses] == [5, 5]
    assert all(of_rank[4] < 0.9 * of_rank[0] for of_rank in losses)
