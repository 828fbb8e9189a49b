"""Timelines of profiler events, without a profiler."""

import random

from deepcompile_zero3.tools.timeline import Span
from deepcompile_zero3.tools.tracing.profile import Event, events_of, steps_of, timeline_of

STEP = Event("range", "ProfilerStep#3", 100.0, 200.0, 1)


def op(name, start, end, thread=1):
    return Event("operator", name, 100.0 + start, 100.0 + end, thread)


def ours(what, start, end, names="a, b", size="[Float, 64 bytes] "):
    return Event("range", f"zero3::{what} {size}{names}", 100.0 + start, 100.0 + end, 1)


def kernel(name, start, end, launched, thread=1):
    return Event("kernel", name, 100.0 + start, 100.0 + end, thread, 100.0 + launched)


def lanes(*events):
    """Returns the spans of a timeline by lane."""
    shuffled = list(events)
    random.Random(0).shuffle(shuffled)
    result = {}
    for span in timeline_of(shuffled, STEP).spans:
        result.setdefault(span.lane, []).append(span)
    return result


def test_a_gather_is_in_flight_from_its_start_to_the_end_of_its_wait():
    found = lanes(
        op("zero3::all_gather_start", 1, 3),
        ours("all_gather start", 2, 3),
        op("aten::copy_", 2, 2.5),
        op("aten::mm", 3, 5),
        op("aten::empty", 3, 4),
        op("zero3::all_gather_wait", 5, 9),
        op("aten::item", 5, 5.5),
        ours("all_gather wait", 6, 8),
        op("graph_0_cpp_fused_add_1", 9, 10),
    )
    assert found == {
        "compute": [
            Span("compute", "aten::mm", 3, 5),
            Span("compute", "graph_0_cpp_fused_add_1", 9, 10),
        ],
        "gather": [Span("gather", "all_gather", 2, 8, ("a", "b"), 64)],
        "waiting": [Span("waiting", "all_gather", 6, 8, ("a", "b"), 64)],
    }


def test_gathers_that_overlap_take_turns():
    found = lanes(
        ours("all_gather start", 0, 1, "a"),
        ours("all_gather start", 1, 2, "b"),
        ours("all_gather wait", 3, 4, "a"),
        ours("all_gather wait", 4, 6, "b"),
        ours("all_gather start", 7, 8, "a"),
        ours("all_gather wait", 8, 9, "a"),
    )
    spans = [(span.parameters, span.start, span.end) for span in found["gather"]]
    assert spans == [(("a",), 0, 4), (("b",), 4, 6), (("a",), 7, 9)]


def test_a_reduction_begins_when_its_first_gradient_is_sent():
    found = lanes(
        ours("reduce_scatter send", 1, 2, "b"),
        op("zero3::reduce_mm", 3, 6),
        op("aten::mm", 3, 5),
        ours("reduce_scatter send", 5, 6, "a"),
        ours("reduce_scatter start", 7, 8, "b, a"),
        ours("reduce_scatter send", 7.2, 7.4, "b, a"),
        ours("reduce_scatter wait", 9, 10, "b, a"),
        ours("reduce_scatter start", 20, 21, "b, a"),
        ours("reduce_scatter wait", 21, 22, "b, a"),
        ours("all_reduce start", 22, 23, "a"),
        ours("all_reduce wait", 23, 24, "a"),
    )
    times = [(span.name, span.start, span.end) for span in found["reduce"]]
    assert times == [("reduce_scatter", 1, 10), ("reduce_scatter", 20, 22), ("all_reduce", 22, 24)]
    assert found["compute"] == [Span("compute", "aten::mm", 3, 5)]


def test_events_before_or_after_the_step_are_cut():
    found = lanes(
        op("aten::mm", -2, -1),
        ours("all_gather start", -1, 0, "a"),
        ours("all_gather wait", 2, 3, "a"),
        ours("all_gather start", 90, 91, "b"),
        ours("all_gather wait", 101, 102, "b"),
    )
    times = [(span.parameters, span.start, span.end) for span in found["gather"]]
    assert times == [(("a",), 0, 3), (("b",), 90, 100)]
    assert "compute" not in found


def test_of_a_backward_what_the_engine_calls_computes():
    found = lanes(
        op("autograd::engine::evaluate_function: CompiledFunctionBackward", 0, 20),
        op("CompiledFunctionBackward", 1, 19),
        op("## Call CompiledFxGraph abc ##", 2, 18),
        op("aten::mm", 3, 5),
        ours("presence wait", 6, 7, "a and 3 more", size=""),
        op("torch::autograd::AccumulateGrad", 21, 23),
        op("aten::add_", 22, 23),
        op("mine::attention", 24, 25),
        op("aten::mm", 30, 31, thread=2),
    )
    names = [span.name for span in found["compute"]]
    assert names == ["aten::mm", "aten::add_", "mine::attention"]
    assert found["waiting"] == [Span("waiting", "presence", 6, 7, ("a and 3 more",))]
    assert found.keys() == {"compute", "waiting"}


def test_collectives_of_others_are_waited_for():
    found = lanes(
        op("_c10d_functional::all_reduce", 0, 1),
        op("c10d::allreduce_", 0.2, 0.5),
        op("aten::sum", 1, 6),
        op("_c10d_functional::wait_tensor", 2, 4),
        op("aten::add", 4, 5),
    )
    assert found == {
        "compute": [Span("compute", "aten::add", 4, 5)],
        "waiting": [Span("waiting", "others", 2, 4)],
    }


def test_kernels_of_a_gpu_compute_and_send():
    found = lanes(
        op("aten::mm", 0, 1),
        ours("all_gather start", 1, 2),
        ours("all_gather wait", 2, 2.1),
        kernel("copy", 4, 5, launched=1.2),
        kernel("ncclDevKernel_AllGather", 5, 10, launched=1.5),
        kernel("ncclDevKernel_AllGather", 10, 12, launched=1.7),
        kernel("gemm", 6, 9, launched=0.5),
        kernel("add", 8, 11, launched=3),
        kernel("ncclDevKernel_AllReduce", 20, 30, launched=15),
    )
    assert found["compute"] == [Span("compute", "gemm", 6, 9), Span("compute", "add", 9, 11)]
    assert found["gather"] == [Span("gather", "all_gather", 5, 12, ("a", "b"), 64)]
    waits = [(span.parameters, span.start, span.end) for span in found["waiting"]]
    assert waits == [(("a", "b"), 5, 6), (("a", "b"), 11, 12)]
    assert "reduce" not in found


def test_memory_is_what_is_allocated_beyond_the_least():
    events = [Event("memory", "", 100.0 + t, 100.0 + t, nbytes=n) for t, n in ((1, 7), (2, 3))]
    timeline = timeline_of([*events, Event("memory", "", 0.0, 0.0, nbytes=1)], STEP)
    assert timeline.kinds == ("allocated",)
    assert timeline.memory == ((1.0, (4,)), (2.0, (0,)))
    on_gpu = timeline_of([*events, kernel("gemm", 0, 1, 0)], STEP)
    assert on_gpu.memory == ((1.0, (7,)), (2.0, (3,)))


def test_no_events_are_an_empty_step():
    timeline = timeline_of([], STEP)
    assert (timeline.name, timeline.spans, timeline.memory) == ("measured", (), ())


# ---- torch's exported traces


def _record(cat, name, ts, dur=None, tid=1, **args):
    record = {"ph": "X", "cat": cat, "name": name, "ts": ts, "tid": tid, "args": args}
    return record if dur is None else record | {"dur": dur}


def _memory(ts, total, device):
    args = {"Total Allocated": total, "Device Type": device}
    return _record("cpu_instant_event", "[memory]", ts, **args)


def test_a_chrome_trace_is_read():
    records = [
        {"ph": "M", "name": "process_name", "args": {}},
        _record("user_annotation", "ProfilerStep#2", 20, 5),
        _record("user_annotation", "ProfilerStep#1", 10, 5),
        _record("cpu_op", "aten::mm", 11, 2, tid=3),
        _record("cuda_runtime", "cudaLaunchKernel", 12, 1, tid=3, correlation=9),
        _record("kernel", "gemm", 13, 4, tid=7, correlation=9),
        _record("kernel", "lost", 14, 1, tid=7, correlation=10),
        _record("python_function", "main", 0, 9),
        _memory(12, 100, device=0),
    ]
    events = events_of({"traceEvents": records})
    assert [step.name for step in steps_of(events)] == ["ProfilerStep#1", "ProfilerStep#2"]
    by_name = {event.name: event for event in events}
    assert by_name["gemm"] == Event("kernel", "gemm", 13e-6, 17e-6, 3, 12e-6)
    assert by_name["lost"].launched == 14e-6
    assert by_name["aten::mm"] == Event("operator", "aten::mm", 11e-6, 13e-6, 3)
    assert by_name["allocated"] == Event("memory", "allocated", 12e-6, 12e-6, 1, nbytes=100)
    assert "main" not in by_name


def test_memory_is_that_of_the_gpu_if_there_is_one():
    records = [_memory(1, 5, device=0), _memory(2, 6, device=1)]
    assert [event.nbytes for event in events_of({"traceEvents": records})] == [6]
    assert [event.nbytes for event in events_of({"traceEvents": records[:1]})] == [5]
