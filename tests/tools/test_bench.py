"""The benchmark runs and reports its results."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from support.command_line import call
from support.paths import ROOT

sys.path.append(str(ROOT))  # the last: an installed package comes before the source tree

from bench import documents, gpu, kernels, overlap
from bench.__main__ import main
from bench.modes import MODES, ON_GPU
from bench.ranks import Ranks
from bench.workloads import LLAMAS


def bench(*arguments, timeout=300):
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.long
def test_modes_step_in_turn_and_are_compared_with_the_floor(tmp_path):
    run = bench(
        *("-w", "tiny", "-m", "floor,zero3-eager,fsdp2-eager", "--rounds", 2, "--warmup", 1),
        *("--output", tmp_path),
    )

    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / "tiny.json").read_text())
    assert {name: len(mode["steps"]) for name, mode in results["modes"].items()} == {
        "floor": 2,
        "zero3-eager": 2,
        "fsdp2-eager": 2,
    }
    sent = {name: mode["collectives"] for name, mode in results["modes"].items()}
    assert sent["floor"] == {}
    # All gradients, once. The runtime counts those of zero3, the profiler those of FSDP2.
    assert sent["zero3-eager"]["reduce_scatter"][1] == sent["fsdp2-eager"]["reduce_scatter"][1]
    assert "| fsdp2-eager |" in run.stdout
    assert (tmp_path / "steps-default-malloc.png").stat().st_size > 0


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_deepspeed_reduces_all_gradients_once_and_their_norm(tmp_path):
    run = bench(
        *("-w", "tiny", "-m", "zero3-eager,deepspeed", "--rounds", 1, "--warmup", 1),
        *("--output", tmp_path),
    )

    assert run.returncode == 0, run.stderr
    modes = json.loads((tmp_path / "tiny.json").read_text())["modes"]
    sent = modes["deepspeed"]["collectives"]
    assert sent["reduce_scatter"][1] == modes["zero3-eager"]["collectives"]["reduce_scatter"][1]
    assert sent["all_reduce"] == [1, 8]  # a double
    assert sent["all_gather"][1] >= sent["reduce_scatter"][1]


def test_deepspeed_is_a_mode_only_where_it_is_installed():
    assert ("mode deepspeed" in call(main, "--help").stdout) == (find_spec("deepspeed") is not None)


def test_an_unknown_mode_is_refused_with_those_that_there_are():
    run = call(main, "-m", "zero4")

    assert run.returncode == 2
    assert "zero4 is not among floor, zero3" in run.stderr


@pytest.mark.long
def test_modes_train_in_turn_as_they_do_on_a_gpu(tmp_path):
    run = bench(
        *("gpu", "--device", "cpu", "--model", "tiny", "--layers", 1),
        *("--modes", "zero3-eager,fsdp2-eager", "--trace", "zero3-eager", "--rounds", 1),
        *("--steps", 2, "--warmup", 1, "--output", tmp_path),
        timeout=120,
    )

    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert len(results["kernels"]) == 1 + len(kernels.COPIES)
    (found,) = results["rounds"]
    assert {name: len(mode["steps"]) for name, mode in found.items()} == {
        "zero3-eager": 2,
        "fsdp2-eager": 2,
    }
    assert "| fsdp2-eager |" in run.stdout
    assert "there is nothing to draw" in run.stdout
    assert (tmp_path / "trace-zero3-eager.json.gz").stat().st_size > 0


_MILLISECONDS = {"plain": [10, 20, 12], "zero3": [15, 15, 18]}  # in each round


@pytest.mark.long
def test_a_prediction_is_compared_with_steps():
    run = bench(*("plan", "-w", "tiny", "--ranks", 1, "--rounds", 1, "--steps", 1))

    assert run.returncode == 0, run.stderr
    (row,) = [line for line in run.stdout.splitlines() if line.startswith("| tiny |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[5] == "as planned"
    # The step of a small model is mostly Python, which a plan does not model. A busy machine may be
    # slower when the kernels are measured than at the step.
    assert 0 < float(cells[3]) <= 2 * float(cells[2])
    assert float(cells[6]) == pytest.approx(float(cells[7]), rel=0.05)


def _table(command, *cells):
    rows = "".join(f"| {cell} |\n" for cell in cells)
    return f"`{command}`, 2 cores (x86_64), now\n\n| mode |\n| --- |\n{rows}"


def test_tables_of_a_page_are_written_anew_in_the_order_in_which_a_command_prints_them(tmp_path):
    page, command = tmp_path / "page.md", "python -m bench -w A,B"
    other = _table("python -m bench -w moe", 3)
    page.write_text(f"A\n\n{_table(command, 1, 10)}\nMoE\n\n{other}\nB\n\n{_table(command, 2)}")
    documents.write(page, command, f"\n## A\n\n{_table(command, 4)}\n## B\n\n{_table(command, 5)}")

    assert page.read_text() == (
        f"A\n\n{_table(command, 4)}\nMoE\n\n{other}\nB\n\n{_table(command, 5)}"
    )
    with pytest.raises(
        SystemExit, match="has 2 tables of `python -m bench -w A,B`, which printed 1"
    ):
        documents.write(page, command, _table(command, 6))
    assert _table(command, 6) not in page.read_text()


class _Sleeper:
    def __init__(self, rank, world_size, store):
        pass

    def ready(self):
        return True

    def sleep(self):
        time.sleep(3)


@pytest.mark.more
def test_a_rank_that_does_not_answer_says_where_it_is(tmp_path, capfd):
    ranks = Ranks(partial(_Sleeper), 1, str(tmp_path))
    try:
        assert ranks.call("ready", timeout=60) == [True]
        with pytest.raises(TimeoutError, match="rank 0 did not answer 'sleep' in 1 s"):
            ranks.call("sleep", timeout=1)
    finally:
        ranks.close()
    assert "test_bench.py" in capfd.readouterr().err


class _Ranks:
    """Fake ranks of a mode: ``slow`` takes too long, and unknown modes fail."""

    def __init__(self, make, world_size, cache):
        _, mode = make.args
        self._mode, self._round = mode, sum(name == mode for name in _Ranks.started)
        _Ranks.started.append(mode)

    def call(self, command, *args, timeout):
        if self._mode == "slow":
            raise TimeoutError("rank 0 did not answer")
        if self._mode not in _MILLISECONDS:
            raise EOFError
        seconds = _MILLISECONDS[self._mode][self._round] / 1e3
        fields = {"graphs": 1, "first": 1, "allocated": 0, "reserved": 0, "loss": 2.5}
        return [fields | {"steps": [seconds] * 3}]

    def close(self):
        pass


def _run_steps(tmp_path, monkeypatch, modes, missing=None, **settings):
    monkeypatch.setattr(gpu, "Ranks", _Ranks)
    _Ranks.started = []
    args = {"device": "cpu", "model": "tiny", "parts": ["steps"], "trace": [], "rounds": 3}
    args |= {"layers": None, "batch": None, "sequence": None, "warmup": 1, "steps": 3}
    args |= {"longest": 60, "cache": None}
    with pytest.raises(SystemExit, match=missing) if missing else nullcontext():
        gpu.run(Namespace(modes=modes, output=tmp_path, **{"minutes": 1} | args | settings))
    return json.loads((tmp_path / "gpu.json").read_text())


def test_a_ratio_is_the_median_over_rounds(tmp_path, monkeypatch, capsys):
    _run_steps(tmp_path, monkeypatch, ["plain", "zero3"])

    assert _Ranks.started == ["plain", "zero3", "zero3", "plain", "plain", "zero3"]
    (row, *_) = [x for x in capsys.readouterr().out.splitlines()[::-1] if x.startswith("| zero3 ")]
    assert row.startswith("| zero3 | 15.0 | 1.500 | 0.750 to 1.500 (3) |")
    assert row.endswith("| 2.5000 |")


def test_a_mode_that_fails_says_so_and_is_not_tried_again(tmp_path, monkeypatch, capsys):
    modes = ["slow", "plain", "broken"]
    missing = "^not measured: slow, broken$"
    results = _run_steps(tmp_path, monkeypatch, modes, missing, rounds=2)

    assert _Ranks.started == [*modes, "plain"]  # the others had failed
    assert results["rounds"][0]["slow"] == {"error": "rank 0 did not answer"}
    assert results["rounds"][0]["broken"] == {"error": "its process ended"}
    assert "| plain | 15.0 | 1.000 |" in capsys.readouterr().out


def test_nothing_begins_for_which_there_is_no_time(tmp_path, monkeypatch, capsys):
    missing = "^not measured: round 1 of plain, round 2 of plain, round 3 of plain$"
    results = _run_steps(tmp_path, monkeypatch, ["plain"], missing, minutes=0)

    assert _Ranks.started == []
    assert results["rounds"] == [{}, {}, {}]
    assert "round 2, plain: there is no time for it" in capsys.readouterr().out


@pytest.mark.usefixtures("one_rank")
def test_the_plain_mode_trains_where_the_floor_only_takes_as_long():
    tokens = LLAMAS["llama-tiny"].tokens(torch.Generator())
    with torch.compiler.set_stance("force_eager"):
        steps = [mode.build(LLAMAS["llama-tiny"]) for mode in (ON_GPU["plain"], MODES["floor"])]
        plain, floor = [[step(tokens).item() for _ in range(4)] for step in steps]

    assert plain[0] > plain[1] > plain[2] > plain[3]
    assert floor == 4 * floor[:1]


def test_copies_have_a_line_each_and_are_compared_with_a_plain_one():
    rows = list(kernels.measure("cpu", sizes=[1], reference=1, repetitions=2))

    assert [row["kernel"] for row in rows[1:]] == [copy.name for copy in kernels.COPIES]
    assert rows[0]["of_plain"] == 1
    for row in rows:
        assert 0 < row["best"] <= row["median"]
        assert kernels.line(row).count("|") == kernels.HEAD.splitlines()[0].count("|")


@pytest.mark.parametrize("copy", kernels.COPIES, ids=lambda copy: copy.name)
def test_copies_do_what_those_of_torch_do_which_they_are_compared_with(copy):
    to, source = copy.tensors(1 << 18, "cpu")
    copy.ours(to, source)
    ours = [each.clone() for each in to]
    copy.torchs(to, source)

    assert all(map(torch.equal, ours, to))
    assert copy.moved(1 << 18) == sum(each.nbytes for each in [*to, *source])


def test_operations_of_a_step_are_six_for_each_token_and_weight_and_those_of_attention():
    workload = LLAMAS["llama-tiny"]
    model = workload.build()
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    weights -= model.get_input_embeddings().weight.numel()
    attention = workload.layers * workload.hidden * workload.sequence

    assert gpu.flops(workload) == 6 * (weights + attention) * workload.batch * workload.sequence


@pytest.mark.parametrize(
    ("some", "others", "expected"),
    [
        ([], [(0, 1)], 0),
        ([(0, 1)], [(1, 2)], 0),
        ([(0, 10)], [(2, 3), (5, 7)], 3),
        ([(4, 6), (0, 5)], [(1, 2), (5, 9)], 2),
        ([(0, 2), (0, 2), (1, 3)], [(0, 3), (2, 3)], 3),  # counted once
    ],
)
def test_overlap_is_the_time_in_which_something_of_both_goes_on(some, others, expected):
    assert overlap.overlap(some, others) == overlap.overlap(others, some) == expected


def test_a_union_has_each_moment_once_and_in_order():
    assert overlap.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert overlap.length([(5, 6), (0, 2), (1, 3), (3, 4)]) == 5


def test_a_trace_tells_streams_their_overlap_and_when_the_host_waits(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": _EVENTS}))
    trace = overlap.read(path)
    found = overlap.summary(trace)

    assert found == {
        "step": 9.0,
        "busiest": 7,
        "streams": {
            7: {"kernels": 2, "busy": 6.0, "beside": 0.0},
            20: {"kernels": 3, "busy": 5.0, "beside": 3.0},
        },
        "kinds": {"others": 4.0, "copies of zero3": 2.0, "NCCL, copies by the driver": 5.0},
        "waits": {"cudaStreamSynchronize": 1},
    }
    assert "| 20 | 3 | 5.00 | 55.6% | 3.00 ms (60%) |" in overlap.table("zero3", found)
    overlap.plot(trace, "a step", tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 0


def _event(category, name, start, end, **args):
    """Returns an event as the profiler writes it, in µs; ``start`` and ``end`` are in ms."""
    begin = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 1}
    return begin | {"ts": 5e9 + 1e3 * start, "dur": 1e3 * (end - start), "args": args}


_COPY = (
    "void zero3::(anonymous namespace)::copy_kernel<float, c10::BFloat16, 128>"
    "(zero3::CopyBatch<128>)"
)
_EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    _event("user_annotation", "one step", -1, 10),
    _event("kernel", "triton_poi_fused_mul_0", 0, 4, stream=7),
    _event("kernel", _COPY, 5, 7, stream=7),
    _event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 2, 4, stream=20),
    _event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 6, 8, stream=20),
    _event("gpu_memset", "Memset (Device)", 8, 9, stream=7)
    | {"cat": "gpu_user_annotation"},  # not work
    _event("kernel", "ncclDevKernel_AllGather_RING_LL", 8, 9, stream=20),
    _event("cuda_runtime", "cudaLaunchKernel", 0, 1),
    _event("cuda_runtime", "cudaStreamSynchronize", 3, 4),
    _event("cuda_runtime", "cudaDeviceSynchronize", 11, 12),  # after the step
]


def test_arguments_ahead_of_the_name_of_a_part_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["-w", "B", "compile"])
    assert "unrecognized arguments: compile" in capsys.readouterr().err
