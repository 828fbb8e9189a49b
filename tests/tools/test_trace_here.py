"""``trace`` in this process: what it tells and predicts, and which scripts it cannot trace."""

import argparse
import json
import re
import sys
import textwrap
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import optimizer as torch_optimizer

from deepcompile_zero3 import fully_shard
from deepcompile_zero3.graph.capture import CapturedGraphs
from deepcompile_zero3.tools.tracing import prediction, trace

ONE_RANK = """
import torch
from deepcompile_zero3 import fully_shard

model = fully_shard(torch.nn.Linear(4, 4), transport="c10d")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
some = torch.ones(2, 4)
def compiled(**settings):
    return torch.compile(model, backend="zero3", options={{"inductor": False}}, **settings)
run = compiled()
static = compiled(dynamic=False)
for step in range(4):
    {step}
    optimizer.step()
"""

PLAIN = """
import sys
import torch

parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range({steps}):
    parameter.square().sum().backward()
    optimizer.step()
{end}
"""


@pytest.mark.parametrize(
    ("code", "remark"),
    [
        ("run(some).sum().backward()", ""),
        ("static(some if step else some[:1]).sum().backward()", ""),
        ("model(some).sum().backward()", 'no graph of torch.compile(..., backend="zero3") ran'),
        ("for _ in some: run(some).sum().backward()", "ran 2 times in the step"),
        ("(run(some).sum() + run(some).detach().sum()).backward()", "ran 2 times in the step"),
        (
            "run(some).sum().backward(); torch.no_grad()(run)(some)",
            "ran in the step without a backward",
        ),
        ("run(torch.ones(2 + step, 4)).sum().backward()", "is of sizes that change"),
        (
            "run(some).sum().backward(); model(some).sum().backward()",
            "the step sends 2 all_gather of 0.000 MiB, 2 reduce_scatter",
        ),
    ],
)
def test_a_prediction_that_is_not_sound_is_none(one_rank, tmp_path, capsys, code, remark):
    script, told = tmp_path / "one_rank.py", tmp_path / "step.json"
    script.write_text(ONE_RANK.format(step=code))
    asked = {"script": str(script), "machine": "h100", "json": str(told)}
    assert _trace(tmp_path, steps=0, **asked) == 0
    step = json.loads(told.read_text())
    assert remark in step["remark"]
    assert (step["predicted"] is None) == bool(step["remark"]) == bool(remark)
    printed = " ".join(capsys.readouterr().out.split())
    assert "no prediction: " + step["remark"] in printed if remark else "predicted" in printed


def test_nothing_is_measured_for_a_step_that_is_not_predicted(one_rank, tmp_path, capsys):
    script = tmp_path / "one_rank.py"
    evaluates = "torch.no_grad()(model)(some); run(some).sum().backward()"
    script.write_text(ONE_RANK.format(step=evaluates))
    assert _trace(tmp_path, steps=0, script=str(script), machine="here") == 0
    told = capsys.readouterr()
    assert "or the script evaluates between two steps" in " ".join(told.out.split())
    assert "measures" not in told.err


def test_an_unknown_machine_is_an_error(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(["--machine", "h1000", "train.py"])
    assert raised.value.code == 2
    told = capsys.readouterr().err
    assert all(f"'{name}'" in told for name in ("h1000", "h100", "b200", "here"))
    assert _trace(tmp_path, steps=1, machine="here", set=[("speed", 1.0)]) == 2
    assert "a machine has no 'speed'" in capsys.readouterr().err
    assert _trace(tmp_path, steps=1, set=[("flops", 1.0)]) == 2
    assert "--set is of a --machine" in capsys.readouterr().err


def test_ranges_of_a_profile_name_their_parameters(one_rank):
    model = fully_shard(torch.nn.Linear(4, 64), transport="c10d")
    with torch.profiler.profile() as profile:
        model(torch.ones(2, 4)).sum().backward()
    ranges = [event.name for event in profile.events() if event.name.startswith("zero3::")]
    collectives = [name for name in ranges if "[" in name]
    assert [name for name in collectives if "reduce" not in name] == [
        "zero3::all_gather start [Float, 1280 bytes] weight, bias",
        "zero3::all_gather wait [Float, 1280 bytes] weight, bias",
    ]
    assert {re.sub("(weight, bias)|(bias, weight)", "...", name) for name in collectives[-3:]} == {
        f"zero3::reduce_scatter {phase} [Float, 1280 bytes] ..."
        for phase in ("start", "send", "wait")
    }


# ---- in this process


def _trace(tmp_path, steps, end="", skip=2, count=2, **options):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PLAIN).format(steps=steps, end=end))
    known = {"script": str(script), "arguments": ["a"], "save": None, "json": None}
    known |= {"machine": None, "set": []}
    return trace.main(argparse.Namespace(skip=skip, steps=count, **known | options))


@pytest.fixture(autouse=True)
def _nothing_is_left_set():
    def state():
        return sys.argv, list(sys.path), inductor_config.cpp.enable_kernel_profile

    hooks = torch_optimizer._global_optimizer_post_hooks
    before, hooks_before = state(), dict(hooks)
    yield
    assert state() == before
    assert hooks.items() <= hooks_before.items()  # those of earlier models may be gone by now


def test_a_script_that_shards_nothing_is_reported(tmp_path, capsys):
    assert _trace(tmp_path, steps=4, json=str(tmp_path / "step.json")) == 0
    printed = capsys.readouterr().out
    assert "nothing is sharded" in printed
    step = json.loads((tmp_path / "step.json").read_text())
    assert len(step["durations"]) == 2
    assert {span["lane"] for span in step["timeline"]["spans"]} == {"compute"}


def test_a_script_that_ends_too_early_is_an_error(tmp_path, capsys):
    assert _trace(tmp_path, steps=3) == 1
    assert "took 3 steps and ended, where --skip 2 and --steps 2 need 4" in capsys.readouterr().err
    assert _trace(tmp_path, steps=0, end="sys.exit()") == 1
    assert "torchrun" in capsys.readouterr().err


def test_an_error_of_a_script_is_passed_on(tmp_path, capsys):
    with pytest.raises(ZeroDivisionError):
        _trace(tmp_path, steps=3, end="1 / 0")
    with pytest.raises(SystemExit, match="no data"):
        _trace(tmp_path, steps=1, end="sys.exit('no data')")
    with pytest.raises(SystemExit):
        _trace(tmp_path, steps=5, end="sys.exit()")
    assert " of rank 0: " in capsys.readouterr().out


def test_other_ranks_say_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert _trace(tmp_path, steps=4) == 0
    assert _trace(tmp_path, steps=1) == 1
    assert capsys.readouterr() == ("", "")


def test_a_missing_script_is_an_error(tmp_path, capsys):
    assert _trace(tmp_path, steps=1, script="no/script.py") == 2
    assert "there is no file no/script.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        ("A A A", 3),
        ("AB AB AB", 3),
        ("DDG DDG", 4),  # the optimizer that steps most often counts
        ("A A B B", 3),  # one optimizer replaces another
        ("ABCD ABCD A", 3),
    ],
)
def test_optimizers_of_one_step_count_once(steps, ends):
    optimizers = {name: torch.optim.SGD([torch.zeros(1)], lr=0.1) for name in "ABCDG"}
    counted = trace.Steps()
    for name in steps.replace(" ", ""):
        counted(optimizers[name], (), {})
    assert counted.ended == ends


PARTS_OF_REPLICAS = """
import torch
from deepcompile_zero3 import fully_shard

mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
fully_shard(model, mesh=mesh, transport="c10d", shard_optimizer_over_replicas=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = torch.compile(model, backend="zero3", options={"inductor": False})
for step in range(4):
    run(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def _trace_parts_of_replicas(folder):
    script, told = folder / "parts.py", folder / f"{dist.get_rank()}.json"
    script.write_text(PARTS_OF_REPLICAS)
    assert _trace(folder, steps=0, script=str(script), machine="h100", json=str(told)) == 0
    return json.loads(told.read_text()) if dist.get_rank() == 0 else None


def test_parts_that_travel_between_replicas_are_predicted(run_ranks, tmp_path):
    step, _ = run_ranks(2, _trace_parts_of_replicas, tmp_path)
    assert step["remark"] == ""
    assert {"all_gather over replicas", "reduce_scatter over replicas"} <= {
        span["name"] for span in step["predicted"]["spans"]
    }


IN_PARTS = """
import torch
from deepcompile_zero3 import FileOffloadPolicy, fully_shard, offload_optimizer, step_in_backward

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
fully_shard(model, transport="c10d", offload_policy=FileOffloadPolicy({folder!r}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
calls = []
optimizer.register_step_post_hook(lambda *_: calls.append(optimizer))
{how}
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
assert len(calls) > 10
"""
PARTS = "offload_optimizer(model, optimizer, part_mb=1e-6)"
BUCKETS = "step_in_backward(model, optimizer, bucket_mb=1e-6)"


@pytest.mark.parametrize("how", [PARTS, BUCKETS, f"{PARTS}; {BUCKETS}"])
def test_parts_of_one_step_count_once(one_rank, tmp_path, capsys, how):
    script = tmp_path / "in_parts.py"
    script.write_text(IN_PARTS.format(folder=str(tmp_path), how=how))
    assert _trace(tmp_path, steps=0, script=str(script)) == 0
    assert _trace(tmp_path, steps=0, script=str(script), count=4) == 1
    assert "took 5 steps and ended" in capsys.readouterr().err


def _remark(where):
    """Returns each rank's remark if rank 1 raises while it measures."""
    mesh = init_device_mesh("cpu", (2,))

    def fail(*args, **kwargs):
        raise MemoryError("too little")

    instead = {"_what_to_measure": lambda *args: (CapturedGraphs(), {}, mesh, {})}
    if dist.get_rank() == 1:
        instead[where] = fail
    with mock.patch.multiple(prediction, **instead):
        predicted = prediction.predict(CapturedGraphs(), None, {}, ([], None), [])
    dist.barrier()  # both ranks go on
    return predicted.remark


@pytest.mark.parametrize(
    "where",
    [
        "measure_device",
        pytest.param("_what_to_measure", marks=pytest.mark.long),
        pytest.param("measure_kernels", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_cannot_measure_stops_the_others_from_it(run_ranks, where):
    assert run_ranks(2, _remark, where) == ["MemoryError: too little"] * 2
