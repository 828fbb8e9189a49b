"""``python -m deepcompile_zero3 trace``: measured steps of a script."""

import json
import os
import re
import subprocess
import sys

import pytest

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


@pytest.mark.more
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
