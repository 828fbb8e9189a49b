"""A plan's model of machines and kernels."""

from argparse import ArgumentTypeError
from dataclasses import replace

import pytest
import torch
from support import transformer_models
from torch import fx, nn

from deepcompile_zero3 import Link, Machine, plan, shard_blocks
from deepcompile_zero3.backend import Options
from deepcompile_zero3.tools.arguments import rate
from deepcompile_zero3.tools.planning.graphs import fake_ranks, trace
from deepcompile_zero3.tools.planning.kernels import Kernel, items_of, kernels_of
from deepcompile_zero3.tools.planning.machine import Ranks
from deepcompile_zero3.tools.planning.measure import key_of, measure_kernels


def _machine():
    return Machine(
        name="round",
        flops={torch.float32: 1e12, torch.bfloat16: 1e13},
        bandwidth=1e11,
        update_bandwidth=1e11,
        launch=1e-6,
        memory=1e9,
        ranks_per_host=4,
        local=Link(1e-6, 1e11),
        remote=Link(1e-5, 1e10),
    )


def test_a_kernel_takes_what_its_flops_or_its_bytes_take():
    machine = _machine()
    assert machine.seconds_of_kernel(1e9, torch.float32, 0) == pytest.approx(1e-3 + 1e-6)
    assert machine.seconds_of_kernel(1e9, torch.bfloat16, 1e9) == pytest.approx(1e-2 + 1e-6)


def test_a_host_receives_what_others_have_once():
    machine = _machine()
    # 8 ranks on 2 hosts: a rank receives a quarter of the other host's half.
    local, remote = machine.bytes_over_links("all_gather", 8_000_000, Ranks(8, 4))
    assert (local, remote) == (6_000_000, 1_000_000)
    seconds = machine.seconds_of_collective("all_gather", 8_000_000, Ranks(8, 4))
    assert seconds == pytest.approx(1e-6 + 3 * 2 * 1e-6 + 1e-5 + 1e-4)
    assert machine.bytes_over_links("all_reduce", 8, Ranks(4, 4)) == (12, 0)
    assert machine.bytes_over_links("all_gather", 8, Ranks(1, 1)) == (0, 0)
    # 12 ranks, 8 and 4: the four share out the part of the eight.
    assert machine.bytes_over_links("all_gather", 12, Ranks(12, 8)) == (9, 2)


def test_over_gloo_each_rank_receives_what_others_have_itself():
    machine = replace(_machine(), backend="gloo")
    assert machine.bytes_over_links("all_gather", 8, Ranks(8, 4)) == (3, 4)
    assert machine.bytes_over_links("all_reduce", 8, Ranks(2, 1)) == (0, 8)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"), [("1gbit", 125e6), ("2.5mbit", 312500), ("8kbit", 1000)]
)
def test_the_rate_of_a_link_is_read_as_tc_has_it(text, bytes_per_second):
    assert rate(text) == bytes_per_second


@pytest.mark.parametrize("text", ["1", "gbit", "-1gbit", "0gbit", "1 Gbit/s", "infgbit"])
def test_other_rates_are_refused(text):
    with pytest.raises(ArgumentTypeError, match="a rate such as 1gbit or 250mbit, got"):
        rate(text)


# ---- kernels


def _graphs(name):
    with fake_ranks(2) as mesh:
        with torch.device("meta"):
            task = getattr(transformer_models, name)()
        shard_blocks(task.model, mesh)
        return trace(task.model, task.batch(2, seed=0)).rewrite(Options())


def test_every_operator_is_in_one_kernel_and_none_waits_for_itself():
    for captured in (graphs := _graphs("qwen3_moe")).forward + graphs.backward:
        graph = captured.graph_module.graph
        items = items_of(graph)
        nodes = [node for item in items for node in (item.nodes if is_kernel(item) else [item])]
        assert len(nodes) == len(set(nodes))
        position = {node: i for i, item in enumerate(items) for node in _nodes(item)}
        for node in nodes:
            for source in node.all_input_nodes:
                assert position.get(source, -1) <= position[node]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x).relu()
        best = h.max(-1, keepdim=True).values.max(0, keepdim=True).values
        mean, variance = torch.var_mean(h, -1, keepdim=True)
        return ((h - best - mean) * (variance + 1).rsqrt()).square().sum()


def test_operators_of_several_results_are_fused_with_what_reads_them():
    found = plan(Twice, {"x": torch.zeros(4, 8)}, world_size=2)
    names = [span.name for span in found.report.timeline.spans if span.lane == "compute"]
    assert any("max" in name and "relu" in name for name in names)
    assert [span.lane for span in found.report.timeline.spans].count("reduce") == 1


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 512, bias=False)

    def forward(self, x):
        gate, up = self.linear(x).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).square().mean()


def test_parts_of_a_tensor_are_read_each():
    with fake_ranks(2) as mesh:
        with torch.device("meta"):
            model = Gated()
        graphs = trace(shard_blocks(model, mesh), {"x": torch.zeros(32, 64)}).rewrite(Options())
    (forward,) = graphs.forward
    _, gated = kernels_of(forward.graph_module.graph)
    assert gated.nbytes == 32 * 512 * 4 + 4  # both halves of the product, and the mean


def is_kernel(item):
    return isinstance(item, Kernel)


def _nodes(item: Kernel | fx.Node):
    return item.nodes if is_kernel(item) else [item]


def test_operations_without_a_product_between_are_one_kernel():
    (forward,) = _graphs("llama").forward
    names = [kernel.name for kernel in kernels_of(forward.graph_module.graph)]
    assert names.count("mm") == 2 * 7 + 1
    assert any("rsqrt" in name or "pow" in name for name in names)
    assert len(names) < sum(node.op == "call_function" for node in forward.graph_module.graph.nodes)


@pytest.mark.long
def test_kernels_of_layers_that_are_alike_are_measured_once():
    graphs = _graphs("llama")
    kernels = [
        kernel
        for captured in (*graphs.forward, *graphs.backward)
        for kernel in kernels_of(captured.graph_module.graph)
        if kernel.flops
    ]
    calls = []
    seconds = measure_kernels(kernels, between=lambda: calls.append(1))
    assert set(seconds) == set(map(key_of, kernels))
    assert len(calls) == len(seconds) < len(kernels)
    assert all(0 < each < 1 for each in seconds.values())


def test_a_product_that_the_runtime_computes_counts_once():
    def build():
        return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(2)])

    found = plan(build, {"input": torch.zeros(16, 512)}, world_size=2)
    # Forward and backward, except the gradient of the first layer's input.
    assert found.flops == 5 * 2 * 16 * 512 * 512
