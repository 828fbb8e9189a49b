"""Compiler caches on disk speed up a second process and never return a wrong graph."""

import os
import signal
from contextlib import closing, nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.command_line import call
from support.models import (
    Stack,
    assert_same_gradients,
    assert_same_step,
    batch_of,
    compiled,
    mean_square,
    mine,
    shard,
)
from support.partitioners import DefaultPartition
from support.ranks import RankPool
from support.retained_graphs import compare_two_losses
from torch import nn
from torch._dynamo.utils import counters

from deepcompile_zero3 import capture_graphs, fully_shard, record_collectives
from deepcompile_zero3.__main__ import main
from deepcompile_zero3.compile_once import cleaning_up
from deepcompile_zero3.graph.recording import record_graphs
from deepcompile_zero3.sharding.module_parameters import registered_in
from deepcompile_zero3.torch_internals import compiler, dynamo_runs
from deepcompile_zero3.torch_internals.vector_instructions import known_vector_instructions


@pytest.fixture
def new_processes(tmp_path):
    """Runs ``new_processes(function, *args)`` on two new ranks; the cache lasts for the test."""

    def run(function, *args):
        with closing(RankPool(2, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))) as pool:
            return pool.run(function, *args)

    return run


def _first_step():
    """Returns what this rank's first step found and stored in the caches."""
    model = Stack(depth=1)
    model, reference = shard(model, model.blocks)
    run = compiled(model, "zero3")
    batch = batch_of(4, 8)
    mean_square(run, mine(batch)).backward()
    mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    joint, graphs = counters["aot_autograd"], counters["inductor"]
    names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_saved")
    found = tuple(joint[name] for name in names), graphs["fxgraph_cache_miss"]

    torch._dynamo.reset()
    with capture_graphs() as captured:  # who wants to see the graphs has them made again
        run = compiled(model, "zero3")
        mean_square(run, mine(batch)).backward()
    assert len(captured.forward) == len(captured.backward) == 1
    return found


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).reshape(x.shape)


def _lengths_that_vary():
    """Takes steps with three lengths, and returns how many graphs the caches lacked."""
    model = nn.Sequential(nn.Linear(8, 8), _Attention(), _Attention(), nn.Linear(8, 8))
    model, reference = shard(model, model)
    run = compiled(model, "zero3")
    for length in (4, 6, 8):
        batch = batch_of(4, 8 * length).view(4, length, 8)
        mean_square(run, mine(batch)).backward()
        mean_square(reference, batch).backward()
    assert_same_gradients(model, reference)
    return counters["aot_autograd"]["autograd_cache_miss"]


@pytest.mark.inductor
def test_graphs_of_equal_blocks_with_dynamic_sizes_are_loaded(new_processes):
    assert sum(new_processes(_lengths_that_vary)) > 1
    assert sum(new_processes(_lengths_that_vary)) == 0


@pytest.mark.inductor
def test_graphs_may_be_retained_whoever_compiled_them(new_processes):
    for _ in range(2):  # one rank compiles and the other loads; then both load
        new_processes(compare_two_losses, "zero3")


@pytest.mark.inductor
def test_one_rank_compiles_and_the_others_load(new_processes, tmp_path):
    assert sorted(new_processes(_first_step)) == [((0, 1, 1), 2), ((1, 0, 0), 0)]
    if known_vector_instructions({}):  # then no file is compiled to see what torch's library has
        assert not any("__avx_chk_kernel" in file.read_text() for file in tmp_path.rglob("*.cpp"))


def _trains(keep_mb, is_captured):
    model, reference = shard(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    run = compiled(model, "zero3", keep_mb=keep_mb)
    with capture_graphs() if is_captured else nullcontext():
        assert_same_step(model, reference, batch_of(4, 8), run=run)


def _is_killed_while_it_compiles(folder):
    pid = os.fork()
    if not pid:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        with cleaning_up():
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.inductor
@pytest.mark.parametrize(
    "is_captured",
    [False, pytest.param(True, marks=pytest.mark.long)],
    ids=["other options", "captured"],
)
def test_kernels_that_were_half_written_are_compiled_again(new_processes, tmp_path, is_captured):
    new_processes(_trains, 0, False)
    objects = list(tmp_path.glob("??/*.main.so"))
    for path in objects:  # what a process leaves that is killed while the linker writes
        path.write_bytes(b"")
        path.with_name(f"{path.stem}_CxxBuild").mkdir()
    _is_killed_while_it_compiles(tmp_path)
    new_processes(_trains, 64, is_captured)
    assert any(path.stat().st_size for path in objects if path.exists())


@pytest.mark.inductor
def test_a_mark_is_there_while_graphs_compile_that_are_not_stored(one_rank, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    marks, compile_graph = [], compiler.compile_fx_inner

    def compile_and_see(*args, **kwargs):
        marks.append(len(list(tmp_path.glob("zero3/*.compiles"))))
        return compile_graph(*args, **kwargs)

    monkeypatch.setattr(compiler, "compile_fx_inner", compile_and_see)
    model = fully_shard(nn.Linear(4, 4))
    with capture_graphs():
        loss = torch.compile(model, backend="zero3")(torch.ones(2, 4)).sum()
    loss.backward()
    assert marks == [1, 1]
    assert not list(tmp_path.glob("zero3/*.compiles"))


def _gathers(keep_mb):
    """Returns how often a step gathers, and finds its graph; runs differ in an option only."""
    torch._dynamo.reset()  # it may know the graph, and not ask the cache
    before = _hits()
    model, _ = shard(torch.nn.Linear(8, 8), transport="c10d")
    run = compiled(model, "zero3", keep_mb=keep_mb)
    with record_collectives() as log:
        mean_square(run, batch_of(2, 8).requires_grad_()).backward()
    gathers = sum(each.op == "all_gather" for each in log)
    return gathers, _hits() - before


def _calls_of_partitioners():
    """Returns how often two partitioners are called as a model is compiled twice."""

    class Unpicklable(DefaultPartition):
        pass

    never_stored, not_compared = DefaultPartition(key=None), Unpicklable("key")
    for _ in range(2):
        torch._dynamo.reset()
        model, _ = shard(torch.nn.Linear(8, 8))
        config = {"custom_partitioner_fn": never_stored}
        mean_square(compiled(model, "zero3", inductor_config=config), batch_of(2, 8)).backward()
        torch._dynamo.reset()
        with torch._inductor.config.patch(custom_partitioner_fn=not_compared):
            mean_square(compiled(model, "zero3"), batch_of(2, 8)).backward()
    return never_stored.calls, not_compared.calls


@pytest.mark.inductor
def test_graphs_of_a_partitioner_without_a_key_are_never_stored(run_ranks):
    assert run_ranks(2, _calls_of_partitioners) == [(2, 2)] * 2


def _hits():
    return counters["aot_autograd"]["autograd_cache_hit"]


JOB = """
import torch
from deepcompile_zero3 import fully_shard
from support.models import Stack

def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

def build():
    return Stack(depth=3), {"x": torch.zeros(2, 8)}, shard
"""


def _step_by_messages():
    model = Stack(depth=3)
    model, reference = shard(model, model.blocks, transport="c10d")
    batch = batch_of(4, 8)
    run = compiled(model, "zero3")
    assert_same_step(model, reference, batch, run=lambda rows: run(x=rows))
    joint = counters["aot_autograd"]
    return joint["autograd_cache_hit"], joint["autograd_cache_miss"]


@pytest.mark.inductor
def test_ranks_find_what_was_compiled_for_them_ahead_of_time(new_processes, tmp_path):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    arguments = ("compile", f"{job}:build", "--ranks", "64", "--keep-mb", "0")
    ran = call(main, *arguments, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "2 x FSDPBlock_0" in ran.stdout
    assert new_processes(_step_by_messages) == [(1, 0)] * 2


@pytest.mark.inductor
def test_only_graphs_that_are_recorded_are_not_stored(one_rank):
    recorded, other = (shard(Stack(depth=depth))[0] for depth in (1, 2))
    stored = []
    with record_graphs(registered_in(recorded)):
        for model in (recorded, other):
            torch.compiler.reset()
            before = dynamo_runs.count_of_stored_graphs()
            mean_square(compiled(model, "zero3"), batch_of(2, 8)).backward()
            stored.append(dynamo_runs.count_of_stored_graphs() - before)
    assert stored == [0, 1]


@pytest.mark.inductor
def test_a_graph_compiled_with_other_options_is_never_run(run_ranks):
    run_ranks(2, _gathers, 0)
    run_ranks(2, _gathers, 64)
    for keep_mb, gathers in ((0, 2), (64, 1)):
        assert run_ranks(2, _gathers, keep_mb) == [(gathers, 1)] * 2


def _alternately_sharded():
    """Alternates between a sharded and a plain model: the passes start from the same graph."""
    for how in ("zero3", "inductor", "zero3"):
        whole = Stack(depth=1)
        run = torch.compile(whole)
        mean_square(run, batch_of(2, 8)).backward()
        expected = [parameter.grad for parameter in whole.parameters()]
        whole.zero_grad()
        mean_square(whole, batch_of(2, 8)).backward()
        for parameter, gradient in zip(whole.parameters(), expected, strict=True):
            torch.testing.assert_close(gradient, parameter.grad)

        model, reference = shard(Stack(depth=1))
        assert_same_step(model, reference, batch_of(4, 8), run=compiled(model, how))


@pytest.mark.inductor
def test_a_graph_compiled_for_a_whole_model_is_never_run_for_a_sharded_one(run_ranks):
    for _ in range(2):  # the second time with everything in the cache
        run_ranks(2, _alternately_sharded)


def _dtype_of_gradients(grad_dtype):
    """Returns a gradient's dtype; runs differ in the parameter's contract only."""
    model = torch.nn.Linear(8, 8).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = grad_dtype
    model, _ = shard(model)
    before = dict(counters["aot_autograd"])
    mean_square(compiled(model, "zero3"), batch_of(2, 8).bfloat16()).backward()
    assert counters["aot_autograd"]["autograd_cache_bypass"] == before.get(
        "autograd_cache_bypass", 0
    )
    return {parameter.grad.dtype for parameter in model.parameters()}


@pytest.mark.inductor
def test_a_graph_compiled_for_other_gradient_dtypes_is_never_run(run_ranks):
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        assert run_ranks(2, _dtype_of_gradients, dtype) == [{dtype}] * 2
