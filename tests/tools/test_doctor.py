"""``python -m deepcompile_zero3 doctor`` makes the checks that it reports."""

import datetime
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command_line import call

import deepcompile_zero3
from deepcompile_zero3.__main__ import main
from deepcompile_zero3.guides import Guide
from deepcompile_zero3.tools import doctor
from deepcompile_zero3.tools.progress import progress


def _run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "deepcompile_zero3", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"} | environment,
    )


@pytest.mark.inductor
def test_all_is_well():
    ran = _run("doctor", ZERO3_TRANSPORT="c10d")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("a step is right, by messages") == 2
    assert "transformers " in ran.stdout
    stages = [line.split(" s  ")[1] for line in ran.stderr.splitlines() if " s  " in line]
    assert stages[0] == "looking at what is installed"
    assert stages[-1] == "taking a step: two ranks, compiled"


def _wait_for_ever(model):
    time.sleep(3600)


def test_a_step_that_does_not_end_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "_TIMEOUT", datetime.timedelta(seconds=3))
    [finding] = doctor.try_steps({"two ranks": _wait_for_ever, "not tried": _wait_for_ever})
    assert finding.found == "no step in 3 s"
    assert finding.remedy


def _refuse(model):
    raise RuntimeError("no compiler today")


@pytest.mark.more
def test_a_step_that_fails_is_reported():
    [finding] = doctor.try_steps({"two ranks": _refuse, "not tried": _refuse})
    assert finding == ("two ranks", "failed", "RuntimeError: no compiler today")


@pytest.mark.more
@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"TORCHDYNAMO_DISABLE": "1"}, "torch.compile is off: unset TORCHDYNAMO_DISABLE"),
        (
            {"TORCHDYNAMO_SUPPRESS_ERRORS": "1", "CXX": "/nowhere/g++"},
            "its error was suppressed: unset TORCHDYNAMO_SUPPRESS_ERRORS",
        ),
    ],
)
def test_a_step_that_was_not_compiled_is_reported(monkeypatch, environment, why):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    [finding] = doctor.try_steps({"two ranks, compiled": doctor._compiled})
    assert finding.found == "failed"
    assert f"no graph was compiled: {why}" in finding.remedy


@pytest.mark.parametrize("name", ["", " "])
def test_a_compiler_without_a_name_is_reported(monkeypatch, name):
    monkeypatch.setenv("CXX", name)
    [finding] = [each for each in doctor._installed() if each.what == "C++ compiler"]
    assert finding.found == "no compiler"
    assert "unset CXX" in finding.remedy


def test_a_finding_with_a_remedy_leads_to_the_page_that_helps(monkeypatch, capsys):
    lacks = doctor.Finding("C++ compiler", "no g++", "Inductor needs one: install g++")
    monkeypatch.setattr(doctor, "_installed", lambda: [lacks])
    monkeypatch.setattr(doctor, "try_steps", lambda ways, tell: [])
    assert doctor.main() == 1
    assert capsys.readouterr().out.endswith(f"See {Guide.INSTALLATION}\n")


def test_stages_go_to_standard_error(capsys):
    with progress() as tell:
        tell("one")
        tell("two")
    told = capsys.readouterr()
    assert [line.split(" s  ")[1] for line in told.err.splitlines()] == ["one", "two"]
    assert not told.out


def test_it_says_what_to_do_without_the_runtime(tmp_path):
    package = Path(deepcompile_zero3.__file__).parent
    without = shutil.ignore_patterns("*.so", "__pycache__")
    copied = shutil.copytree(package, tmp_path / package.name, ignore=without)
    # An editable install would still find a file that is missing here.
    (copied / "_C.py").write_text("raise ImportError('there is none')")
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "deepcompile_zero3", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert ran.returncode != 0
    assert "build it there with: pip install --no-build-isolation" in ran.stderr


def test_without_a_command_it_lists_them():
    ran = call(main)
    assert ran.returncode == 2
    assert "COMMAND" in ran.stderr
