"""Rewritten graphs in torch's own logs."""

import os
import re
import subprocess
import sys

import pytest

TRAIN = """
import torch, torch.distributed as dist
from torch import nn
from deepcompile_zero3 import fully_shard

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
for _ in range(2):
    model = fully_shard(nn.Linear(64, 256, bias=False), transport="c10d")
    step = torch.compile(model, backend="zero3", options={"inductor": False})
    step(torch.ones(2, 64, requires_grad=True)).sum().backward()
    del model, step
    torch._dynamo.reset()  # else the second model runs what was compiled for the first one
plain = torch.compile(nn.Linear(4, 4), backend="zero3", options={"inductor": False})
plain(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


def _logged(**environment):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
    return ran.stderr


def test_torch_logs_has_each_rewritten_graph():
    logged = _logged(TORCH_LOGS="+deepcompile_zero3")
    assert re.search(r"all_gather: i64\[1\] = zero3.all_gather_start\(.*weight", logged)
    assert "zero3.reduce_" in logged
    summaries = re.findall(r"(forward|backward) (\d): (gathers.*)", logged)
    assert summaries[:2] == [
        ("forward", "0", "gathers: 1 (0.062 MiB), kept: 1 (0.062 MiB), reductions: 0 (0.000 MiB)"),
        ("backward", "0", "gathers: 0 (0.000 MiB), kept: 0 (0.000 MiB), reductions: 1 (0.062 MiB)"),
    ]
    assert [summary[:2] for summary in summaries[2:]] == [("forward", "1"), ("backward", "1")]


@pytest.mark.long
def test_torch_logs_at_info_has_a_line_for_each():
    logged = _logged(TORCH_LOGS="deepcompile_zero3")
    assert len(re.findall("gathers: ", logged)) == 4
    assert "zero3.all_gather_start" not in logged


@pytest.mark.more
def test_torch_trace_has_an_artifact_for_each(tmp_path):
    assert _logged(TORCH_TRACE=str(tmp_path)) == ""
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    names = re.findall(r'"artifact": \{"name": "(zero3_\w+)", "encoding": "string"\}', text)
    assert names == [f"zero3_{way}_{n}" for n in range(2) for way in ("forward", "backward")]
    artifact = text.partition('"zero3_forward_0"')[2].partition("\nV")[0]
    assert re.search(r"\n\tall_gather: .* = zero3.all_gather_start\(.*weight", artifact)


@pytest.mark.more
def test_without_them_nothing_is_printed():
    assert _logged() == ""


@pytest.fixture(autouse=True)
def _no_logs_of_the_user(monkeypatch):
    for name in ("TORCH_LOGS", "TORCH_TRACE"):
        monkeypatch.delenv(name, raising=False)
