"""``plan`` and ``explain`` on the command line."""

import argparse
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from support.command_line import call
from support.paths import EXAMPLES
from torch._dynamo.exc import BackendCompilerFailed

from deepcompile_zero3 import Zero3Error, compile_ahead
from deepcompile_zero3.__main__ import main
from deepcompile_zero3.tools.arguments import run_plainly
from deepcompile_zero3.tools.planning import sweep

CONFIGS = EXAMPLES / "configs"


def _run(*arguments):
    return call(main, *arguments, COLUMNS="80")


def _run_apart(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "deepcompile_zero3", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def config(tmp_path):
    values = json.loads((CONFIGS / "llama-3.2-1b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"num_hidden_layers": 1}))
    return path


@pytest.mark.more
def test_a_config_is_planned_from_the_command_line(config, tmp_path):
    page, numbers = tmp_path / "page.html", tmp_path / "plan.json"
    found = _run_apart(
        "plan", config, "--ranks", 8, "--set", "flops=1e14", "--save", page, "--json", numbers
    )
    assert found.returncode == 0, found.stderr
    assert "LlamaForCausalLM on 8 ranks of h100" in found.stdout
    told = json.loads(numbers.read_text())
    assert told["ranks"] == 8
    assert "by you: flops=1e+14" in told["source"]
    assert told["compared"] in " ".join(found.stdout.split())
    assert page.exists()


def test_a_config_that_transformers_refuses_is_named(config):
    config.write_text(config.read_text().replace("2048", "2047"))
    found = _run("plan", config, "--ranks", 8)
    assert found.returncode == 1
    assert f"{config}: transformers refuses it" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.more
def test_a_sweep_is_a_table_and_a_picture(config, tmp_path):
    picture = tmp_path / "sweep.png"
    found = _run("plan", config, "--ranks", 8, "--sweep", "batch=1,2", "--picture", picture)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0].split()[0] == "batch"
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert "h100: NVIDIA H100 SXM data sheet" in found.stdout
    assert picture.stat().st_size > 1000


JOB = """
import torch
from torch import nn
from deepcompile_zero3 import fully_shard
from torch.distributed.fsdp import MixedPrecisionPolicy

def build():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), {"input": torch.zeros(4, 64)}

def alone():
    return nn.Linear(64, 64)

def sharded():
    def shard(model, mesh):
        fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
        fully_shard(model, mesh=mesh)
    return *build(), shard

def shards_itself():
    model, call = build()
    return fully_shard(model), call

def takes_no_mesh():
    return *build(), lambda model: model

def fails():
    raise ValueError("of the user's own")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        print("forward")
        return self.linear(x)

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()

def broken():
    return Blocks(), {"x": torch.zeros(4, 64)}

class Writes(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(2)
        return super().forward(x)

def writes():
    return Writes(64, 64), {"x": torch.zeros(4, 64)}
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


def test_a_users_own_model_is_explained_from_the_command_line(job):
    found = _run("explain", f"{job}:build", "--ranks", 4)
    assert found.returncode == 0, found.stderr
    assert "Sequential: 4 parameters" in found.stdout
    assert "4 ranks" in found.stdout


def test_a_users_own_sharding_is_planned(job):
    found = _run("explain", f"{job}:sharded", "--ranks", 4)
    assert found.returncode == 0, found.stderr
    dtypes = re.findall(r"^([01])\.\S+ .*?\b(b?f\d+)\b", found.stdout, re.M)
    assert {("0", "f16"), ("1", "f32")} <= set(dtypes)
    assert ("0", "bf16") not in dtypes


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("alone", (), "a dict and perhaps a function that shards, and gave Linear"),
        ("shards_itself", (), "if not this command: a function shard(model, mesh)"),
        ("takes_no_mesh", (), "is called with model, mesh: too many positional arguments"),
        (
            "sharded",
            ("--reshard", "always"),
            "--reshard: {job}:sharded says itself how its model is sharded",
        ),
        ("build", ("--batch", 2), "--batch, --sequence and --checkpoint are of a config"),
        ("nothing", (), "has no 'nothing'"),
        ("broken", (), "this model cannot be planned: code that is not compiled reads"),
    ],
)
def test_an_error_in_a_job_is_reported_in_a_line(job, function, options, message):
    found = _run("plan", f"{job}:{function}", "--ranks", 4, *options)
    assert found.returncode == 1
    assert message.format(job=job) in found.stderr
    assert "Traceback" not in found.stderr


def test_a_folder_that_is_not_there_is_named_at_once(job):
    found = _run("plan", f"{job}:build", "--ranks", 4, "--save", "/nowhere/page.html")
    assert found.returncode == 2
    assert "--save: there is no folder /nowhere" in found.stderr


def test_what_cannot_be_written_is_told_at_once(job, tmp_path, monkeypatch):
    for name in ("plotly", "matplotlib.backend_bases"):
        monkeypatch.setitem(sys.modules, name, None)
    picture = ("--sweep", "ranks=2,4", "--picture")
    for options, message in (
        (("--json", tmp_path), f"--json: {tmp_path} is a folder: name a file in it"),
        (("--save", tmp_path / "page.html"), "--save: a page needs plotly: pip install"),
        ((*picture, tmp_path / "sweep.png"), "--picture: a picture needs matplotlib: pip install"),
    ):
        found = _run("plan", f"{job}:build", "--ranks", 4, *options)
        assert found.returncode == 2
        assert message in found.stderr


def test_a_picture_of_an_unknown_format_is_refused_at_once(job):
    found = _run("plan", f"{job}:build", "--ranks", 4, "--sweep", "ranks=2", "--picture", "a.jpx")
    assert found.returncode == 2
    assert "--picture: a name that ends in ." in found.stderr


@pytest.mark.parametrize("knob", ["ranks", "batch", "sequence"])
def test_a_sweep_is_of_positive_numbers(job, knob):
    found = _run("plan", f"{job}:build", "--ranks", 4, "--sweep", f"{knob}=2,0")
    assert found.returncode == 2
    assert "--sweep: a positive number, got '0'" in found.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("ranks=4,3", "replicas is a divisor of the number of ranks, 3; got 2"),
        ("keep_mb=0,-1", "'keep_mb'"),
    ],
)
def test_a_sweep_with_a_wrong_value_plans_nothing(job, values, message):
    found = _run("plan", f"{job}:build", "--ranks", 4, "--replicas", 2, "--sweep", values)
    assert found.returncode == 1
    assert message in found.stderr
    assert "reading the model" not in found.stderr


def test_a_picture_that_fails_loses_no_number(job, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(sweep, "draw", fail)
    files = ("--json", tmp_path / "sweep.json", "--picture", tmp_path / "sweep.png")
    found = _run("plan", f"{job}:build", "--ranks", 4, "--sweep", "ranks=2,4", *files)
    assert found.returncode == 1
    assert "the disk is full" in found.stderr
    assert [each["ranks"] for each in json.loads((tmp_path / "sweep.json").read_text())] == [2, 4]


def _compiles(error):
    def backend(gm, example_inputs):
        raise error

    return lambda _: torch.compile(torch.neg, backend=backend)(torch.ones(1))


def test_an_error_in_a_backend_is_a_line_if_it_is_ours(capsys):
    assert run_plainly(_compiles(Zero3Error("shard it")), argparse.Namespace()) == 1
    assert capsys.readouterr().err == "python -m deepcompile_zero3: shard it\n"
    with pytest.raises(BackendCompilerFailed, match="not ours"):
        run_plainly(_compiles(ValueError("not ours")), argparse.Namespace())


def test_what_cannot_be_compiled_ahead_is_a_line(job):
    found = _run("compile", f"{job}:writes", "--ranks", 4)
    assert found.returncode == 1
    assert "python -m deepcompile_zero3: " in found.stderr
    assert "Traceback" not in found.stderr
    found = _run("compile", f"{job}:build", "--ranks", 4, "--activations-mb", 8)
    assert found.returncode == 2
    assert "unrecognized arguments: --activations-mb" in found.stderr


def test_compiling_ahead_warns_of_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused = pytest.raises(ValueError, match="a positive number of ranks, got 0")
    with pytest.warns(UserWarning, match="the graphs are compiled for CPUs"), refused:
        compile_ahead(torch.nn.Identity, {}, world_size=0)


@pytest.mark.more
def test_an_error_of_the_users_own_keeps_its_place(job):
    found = _run_apart("plan", f"{job}:fails", "--ranks", 4)
    assert found.returncode == 1
    assert "in fails" in found.stderr


def test_a_wrong_model_is_refused_in_a_line(tmp_path):
    found = _run("plan", tmp_path / "none.json", "--ranks", 8)
    assert found.returncode == 1
    assert "none.json" in found.stderr
    assert "Traceback" not in found.stderr
