"""``python -m deepcompile_zero3 trace``: measured steps of a script."""

import argparse
import json
import os
import re
import subprocess
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

PYTHON = (sys.executable, "-m")

SHARDED = """
import __main__, os, pickle, sys
import torch, torch.distributed as dist
from torch import nn
import beside_it
from deepcompile_zero3 import fully_shard

class Mine:
    pass

def main():
    assert os.path.samefile(sys.argv[0], __file__)
    assert sys.argv[1:] == ["6", "--json"]
    assert __main__.Mine is Mine and type(pickle.loads(pickle.dumps(Mine()))) is Mine
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    generator = nn.Linear(4, 4)
    for layer in (model[0], model[2], model):
        fully_shard(layer, transport="c10d")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, generator)]
    compiled = torch.compile(model, backend="zero3", options={"gather_bucket_mb": 0.07})
    for _ in range(int(sys.argv[1])):
        compiled(torch.randn(8, 64)).square().mean().backward()
        generator(torch.randn(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    end = sum(float(p.full_tensor().double().sum()) for p in model.parameters())
    if dist.get_rank() == 0:
        print("it ends with", end)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

LLAMA = """
import torch, torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from deepcompile_zero3 import explain, fully_shard

sizes = dict(hidden_size=36, intermediate_size=43, num_hidden_layers=1, num_attention_heads=2)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, use_cache=False, **sizes))
for block in model.model.layers:
    fully_shard(block, transport="c10d")
fully_shard(model, transport="c10d")
optimizer = torch.optim.AdamW(model.parameters())
options = {"inductor": False, "gather_bucket_mb": 0.02, "keep_mb": 0.02}
step = torch.compile(model, backend="zero3", options=options)
text = torch.arange(32).view(2, 16)
explain(model, input_ids=text, labels=text)
with torch.no_grad():
    step(input_ids=text, labels=text)
for _ in range(4):
    step(input_ids=text, labels=text).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

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


def _torchrun(arguments, folder):
    ranks = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    return subprocess.run(
        [*PYTHON, "torch.distributed.run", *ranks, "-m", "deepcompile_zero3", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_step_of_two_ranks(tmp_path):
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(SHARDED)
    (script.parent / "beside_it.py").write_text("")
    options = ["--skip", "2", "--steps", "3", "--save", "page.html", "--json", "step.json"]
    ran = _torchrun(["trace", *options, "scripts/train.py", "6", "--json"], tmp_path)
    assert ran.returncode == 0, ran.stderr

    lines = [line for line in ran.stdout.splitlines() if not line.startswith("USDT")]
    assert sum(" of rank 0: " in line for line in lines) == 1
    assert all(len(line) <= 80 for line in lines)
    for word in ("compute", "waiting", "gathers in flight", "longest waits"):
        assert sum(line.startswith(word) for line in lines) == 1, ran.stdout

    step = json.loads((tmp_path / "step.json").read_text())
    assert step["number"] in (3, 4, 5)
    assert sorted(step["durations"])[1] == step["duration"]
    assert step["is_sharded"]
    assert not step["compiles"]
    spans = step["timeline"]["spans"]
    moved = [(s["lane"], s["name"]) for s in spans if s["lane"] in ("gather", "reduce")]
    assert set(moved) == {("gather", "all_gather"), ("reduce", "reduce_scatter")}
    gathered = {name for span in spans if span["lane"] == "gather" for name in span["parameters"]}
    assert gathered == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert any(span["nbytes"] >= 64 * 256 * 4 for span in spans if span["lane"] == "gather")
    waits = {span["name"] for span in spans if span["lane"] == "waiting"}
    assert waits == {"all_gather", "reduce_scatter", "presence"}
    computation = {span["name"] for span in spans if span["lane"] == "compute"}
    assert "aten::mm" in computation
    assert any(name.startswith("graph_") for name in computation)
    assert all(0 <= s["start"] <= s["end"] <= step["duration"] for s in spans)
    assert step["timeline"]["kinds"] == ["allocated"]
    assert max(nbytes for _, (nbytes,) in step["timeline"]["memory"]) > 8 * 256 * 4

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "train.py: step" in page
    assert "<td>0.weight, 0.bias</td>" in page


def _by_kind(timeline):
    """Returns the number of collectives and their bytes, by kind."""
    found = {}
    for span in timeline["spans"]:
        if span["lane"] in ("gather", "reduce"):
            number, nbytes = found.get(span["name"], (0, 0))
            found[span["name"]] = number + 1, nbytes + span["nbytes"]
    return found


def _milliseconds(row):
    return [float(cell.replace(",", "")) for cell in re.findall(r"[\d,]+\.\d{3}", row)]


@pytest.mark.long
def test_a_prediction_is_of_the_graphs_that_ran(tmp_path):
    (tmp_path / "train.py").write_text(LLAMA)
    options = ["--steps", "1", "--save", "page.html", "--json", "step.json"]
    asked = ["--machine", "h100", "--set", "launch=2e-3"]
    ran = _torchrun(["trace", *options, *asked, "train.py"], tmp_path)
    assert ran.returncode == 0, ran.stderr

    step = json.loads((tmp_path / "step.json").read_text())
    assert step["remark"] == ""
    assert (step["timeline"]["name"], step["predicted"]["name"]) == (
        "measured",
        "predicted for h100",
    )
    sent = _by_kind(step["predicted"])
    assert sent == _by_kind(step["timeline"])
    assert set(sent) == {"all_gather", "reduce_scatter"}
    assert sent["all_gather"][0] > 4
    states = step["predicted"]["kinds"].index("optimizer")
    shards = step["predicted"]["kinds"].index("shards")
    _, first = step["predicted"]["memory"][1]
    assert first[states] == 2 * first[shards]  # AdamW has two states

    rows = {line[:20].strip(): _milliseconds(line) for line in ran.stdout.splitlines()}
    measured, predicted = rows["step"]
    assert measured == pytest.approx(step["duration"] * 1e3, abs=1e-3)
    lengths = {lane: 0.0 for lane in ("compute", "gather", "reduce", "waiting")}
    for span in step["predicted"]["spans"]:
        lengths[span["lane"]] += (span["end"] - span["start"]) * 1e3
    assert predicted == pytest.approx(lengths["compute"] + lengths["waiting"], abs=1e-3)
    assert predicted > 2 * len([s for s in step["predicted"]["spans"] if s["lane"] == "compute"])
    for name, lane in (("gathers in flight", "gather"), ("waiting", "waiting")):
        assert rows[name][1] == pytest.approx(lengths[lane], abs=1e-3)
    than = "less" if predicted < measured else "more"
    off = f"{abs(predicted / measured - 1):.0%}"
    assert f"predicted for h100: {predicted:,.3f} ms, {off} {than} than measured" in ran.stdout

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    headings = [page.index(f"b\\u003e{name}\\u003c") for name in ("measured", "predicted for h100")]
    assert headings == sorted(headings)


@pytest.mark.long
def test_ranks_measure_themselves_and_train_on_as_if_they_had_not(tmp_path):
    (tmp_path / "train.py").write_text(SHARDED)
    (tmp_path / "beside_it.py").write_text("")
    ends = []
    for asked in ([], ["--machine", "here", "--json", "step.json"]):
        ran = _torchrun(["trace", *asked, "train.py", "6", "--json"], tmp_path)
        assert ran.returncode == 0, ran.stderr
        ends.append([line for line in ran.stdout.splitlines() if "it ends with" in line])
        assert ran.stderr.count("which takes a minute or so") == bool(asked)
        assert ("predicted for these ranks: " in ran.stdout) == bool(asked), ran.stdout
    assert ends[0] == ends[1]
    assert len(ends[0]) == 1
    step = json.loads((tmp_path / "step.json").read_text())
    assert _by_kind(step["predicted"]) == _by_kind(step["timeline"])


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
        hooks = dict(torch_optimizer._global_optimizer_post_hooks)
        return sys.argv, list(sys.path), hooks, inductor_config.cpp.enable_kernel_profile

    before = state()
    yield
    assert state() == before


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
