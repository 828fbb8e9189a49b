"""What a plan says of two hosts: bytes over the link between them, in each layout, and memory."""

import functools
from dataclasses import replace

import pytest
import torch
from support.command_line import call as run
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.workloads import WORKLOADS
from deepcompile_zero3 import Link, Machine, plan, shard_blocks
from deepcompile_zero3.__main__ import main

GBIT = 1e9 / 8
CALL = {"x": torch.zeros(4, 64)}


class _Model(torch.nn.Module):
    """Has parameters that four ranks divide evenly."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _machine():
    return Machine(
        name="a host",
        flops={torch.float32: 1e10},
        bandwidth=1e10,
        update_bandwidth=1e10,
        launch=1e-5,
        memory=8e9,
        ranks_per_host=2,
        local=Link(1e-5, 2e9),
        remote=Link(1e-4, GBIT / 2),
        backend="gloo",
    )


def _plan(layout, build, call, **settings):
    parts = {"shard_optimizer_over_replicas": True} if layout == "parts" else {}
    return plan(
        build,
        call,
        world_size=4,
        replicas=1 if layout == "flat" else 2,
        machine=_machine(),
        shard=lambda model, mesh: shard_blocks(model, mesh, **parts, **settings),
        advise=False,
    )


def test_replicas_and_parts_send_each_parameter_and_gradient_once():
    with torch.device("meta"):
        whole = sum(p.nbytes for p in _Model().parameters())
    small = functools.partial(_plan, build=_Model, call=CALL)
    flat, replicas, parts = (small(layout) for layout in ("flat", "replicas", "parts"))
    assert replicas.host_bytes == parts.host_bytes == whole
    assert replicas.link_seconds == pytest.approx(whole / GBIT)
    # Over gloo each of a host's two ranks gets a half of what is gathered and reduced.
    assert flat.host_bytes == sum(each.nbytes for each in flat.traffic.values())
    assert {*parts.traffic} >= {"all_gather over replicas", "reduce_scatter over replicas"}
    assert parts.memory["optimizer"] == flat.memory["optimizer"] == whole / 2
    assert replicas.memory["optimizer"] == whole
    assert parts.memory["shards"] == whole / 2 + whole / 4


def test_a_last_host_with_fewer_ranks_receives_what_the_others_have():
    machine = replace(_machine(), ranks_per_host=3, backend="nccl")
    found = plan(_Model, CALL, world_size=4, machine=machine, advise=False)
    assert found.host_bytes == sum(each.nbytes for each in found.traffic.values()) * 3 / 4
    assert found.link_seconds == found.host_bytes / machine.remote.bandwidth  # one rank's link


@pytest.mark.more
def test_parts_travel_in_the_dtype_that_is_computed_with():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    replicas, parts = (
        _plan(layout, _Model, CALL, mp_policy=policy) for layout in ("replicas", "parts")
    )
    assert parts.host_bytes == replicas.host_bytes * 3 / 4  # fp32 gradients, bf16 parameters


# MB that a host sent in a step of `python -m bench hosts -w B`, with headers: docs/hosts.md.
MEASURED = {"flat": 712.1, "replicas": 270.0, "parts": 270.1}


@pytest.mark.long
@pytest.mark.parametrize("layout", MEASURED)
def test_two_hosts_send_what_was_planned(layout):
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    found = _plan(layout, WORKLOADS["B"].build, {"input_ids": tokens, "labels": tokens})
    assert found.host_bytes < MEASURED[layout] * 1e6 < 1.005 * found.host_bytes


def build():
    return _Model(), CALL


def _sweep(*more):
    asked = ("--ranks", 4, "--sweep", "layout=flat,replicas,parts", *more)
    return run(main, "plan", f"{__file__}:build", *asked, COLUMNS="80")


@pytest.mark.more
def test_layouts_are_compared_by_what_a_host_sends_and_keeps():
    hosts = ("--set", "ranks_per_host=2", "--host-link", "1gbit", "--backend", "gloo")
    found = _sweep(*hosts, "--param-dtype", "fp32", "--reduce-dtype", "fp32")
    assert found.returncode == 0, found.stderr
    rows = {line.split()[0]: line.split() for line in found.stdout.splitlines() if line}
    assert "link ms" in found.stdout
    whole = 2 * 65 * 64 * 4
    for layout in ("replicas", "parts"):
        assert float(rows[layout][-1]) == pytest.approx(whole / GBIT * 1e3, rel=1e-3)
    assert float(rows["flat"][-1]) > 2 * float(rows["parts"][-1])
    assert "quickest that fits: parts, " in found.stdout
    assert "least memory: flat, " in found.stdout


def test_layouts_of_one_host_are_refused():
    found = _sweep()
    assert found.returncode == 1
    assert "4 ranks are on one host of up to 8: pass --set ranks_per_host=N" in found.stderr


def test_layouts_of_hosts_with_other_numbers_of_ranks_are_refused():
    found = _sweep("--set", "ranks_per_host=3")
    assert found.returncode == 1
    assert "hosts of 3 ranks do not divide 4 ranks: pass another --ranks" in found.stderr
