"""``MeasuredSchedule``: ranks choose one schedule from measured steps, and no number changes.

Most tests replace the clocks of ranks and the machine's numbers, so that they know what is best.
"""

import contextlib
import json
import random
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import INDUCTOR_TOO, Stack, batch_of, mean_square, mine, optimizers_of, shard
from torch import nn

from deepcompile_zero3 import (
    Link,
    Machine,
    MeasuredSchedule,
    Schedule,
    Zero3Error,
    fully_shard,
    record_collectives,
)
from deepcompile_zero3.graph.capture import is_capturing
from deepcompile_zero3.tools.scheduling import measured_schedule
from deepcompile_zero3.tools.scheduling.measured_step import MeasuredStep

OPTIONS = {"inductor": False, "gather_bucket_mb": 4, "keep_mb": 0}
STEPS = 40

# Gathers take most of a step, so that it is worth to keep what was gathered.
MACHINE = Machine(
    name="slow links",
    flops={torch.float32: 1e12},
    bandwidth=1e11,
    update_bandwidth=1e11,
    launch=1e-6,
    memory=float("inf"),
    ranks_per_host=4,
    local=Link(1e-5, 1e7),
    remote=Link(1e-5, 1e7),
    backend="gloo",
)


@contextlib.contextmanager
def known(quicker, free=1 << 40):
    """Gives this rank a clock and measurements of its own, with noise.

    A step takes a second, and ``quicker`` of it with another schedule.
    """
    noise = random.Random(dist.get_rank())
    now = [0.0]

    def clock(schedule):
        seconds = 1.0 if schedule._parameters[0].schedule is None else quicker
        now[0] += seconds * noise.uniform(0.95, 1.05)
        return now[0]

    def measured(events, step, times):
        assert any("zero3::all_gather wait" in event.name for event in events)
        numbers = (1.0, 0.1 / times, 0.2 / times, 0.6 / times)
        return MeasuredStep(*(number * noise.uniform(0.9, 1.1) for number in numbers))

    with (
        mock.patch.object(MeasuredSchedule, "_clock", clock),
        mock.patch.object(MeasuredSchedule, "_machine", return_value=MACHINE),
        mock.patch.object(measured_schedule, "measured_step", measured),
        mock.patch.object(measured_schedule, "free_bytes", return_value=free),
    ):
        yield


def stack(transport="c10d", depth=4, width=32):
    torch.manual_seed(0)
    model = Stack(width, depth)
    model, _ = shard(model, model.blocks, transport=transport)
    return model


def train(model, schedule=None, options=OPTIONS, micro_batches=1, steps=STEPS):
    """Returns the losses of steps of a model compiled now, and how often the last one gathered."""
    torch.compiler.reset()
    run = torch.compile(model, backend="zero3", options=options)
    [optimizer] = optimizers_of(model)
    losses = []
    for number in range(steps):
        with record_collectives() as log:
            for _ in range(micro_batches):
                loss = mean_square(run, mine(batch_of(4, model.head.in_features, seed=number)))
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return losses, sum(each.op == "all_gather" for each in log)


def _chosen(quicker, micro_batches=1, file=None, free=1 << 40):
    expected, gathers = train(stack(), micro_batches=micro_batches)
    model = stack()
    with known(quicker, free):
        schedule = MeasuredSchedule(model, file)
        losses, fewer = train(model, schedule, micro_batches=micro_batches)
    assert schedule.is_settled
    assert not is_capturing()
    assert losses == expected
    return schedule.schedule, schedule.reason, gathers, fewer


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(4, 1), pytest.param(2, 2, marks=pytest.mark.long)]
)
def test_ranks_agree_on_a_quicker_schedule_whatever_their_clocks_say(
    run_ranks, ranks, micro_batches
):
    of_ranks = run_ranks(ranks, _chosen, 0.8, micro_batches)
    assert len(set(of_ranks)) == 1
    schedule, reason, gathers, fewer = of_ranks[0]
    assert schedule.keep_mb > 0
    assert fewer < gathers
    assert "predicted to be saved" in reason


def test_a_schedule_that_the_clock_does_not_find_quicker_is_taken_back(run_ranks):
    for schedule, reason, gathers, fewer in run_ranks(2, _chosen, 1.2):
        assert schedule is None
        assert reason.startswith("the options stay: a step takes 1,2")
        assert fewer == gathers


def test_nothing_is_kept_in_memory_that_was_not_free(run_ranks):
    for schedule, *_ in run_ranks(2, _chosen, 0.8, 1, None, 0):
        assert schedule is None or schedule.keep_mb == 0


def _twice(file):
    first, *_ = _chosen(0.8, file=file)
    model = stack()
    schedule = MeasuredSchedule(model, file)
    assert schedule.is_settled
    assert not is_capturing()
    assert schedule.reason == f"taken from {file}"
    _, gathers = train(model, schedule, steps=2)
    return first, schedule.schedule, gathers


def test_a_later_run_takes_the_choice_from_the_file(run_ranks, tmp_path):
    file = tmp_path / "schedule.json"
    of_ranks = run_ranks(2, _twice, str(file))
    for first, second, gathers in of_ranks:
        assert first == second
        assert isinstance(second, Schedule)
        assert gathers == of_ranks[0][2]
    assert json.loads(file.read_text())["options"] == of_ranks[0][1]._asdict()
    assert [each.name for each in tmp_path.iterdir()] == ["schedule.json"]


def _another_model(file):
    _chosen(1.2, file=file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = MeasuredSchedule(stack(depth=3), file)
    assert not schedule.is_settled
    return [str(each.message) for each in caught if "MeasuredSchedule" in str(each.message)]


def test_a_file_of_another_model_is_told_and_replaced(run_ranks, tmp_path):
    told, nothing = run_ranks(2, _another_model, str(tmp_path / "schedule.json"))
    assert len(told) == 1
    assert "is of another model, number of ranks or version" in told[0]
    assert nothing == []


def _unreadable(file):
    with pytest.raises(Zero3Error, match=r"is not one of its files .*: remove it"):
        MeasuredSchedule(stack(), file)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1}', '{"version": 1, "model": "", "options": 3}']
)
def test_a_file_of_something_else_is_an_error_on_all_ranks(run_ranks, tmp_path, text):
    (tmp_path / "schedule.json").write_text(text)
    run_ranks(2, _unreadable, str(tmp_path / "schedule.json"))


def _stays(transport="c10d", profiles=False, compiled_before=False):
    model = stack(transport)
    if compiled_before:
        train(model, steps=1)
    schedule = MeasuredSchedule(model)
    with contextlib.ExitStack() as stack_of:
        if profiles:
            profile = stack_of.enter_context(torch.profiler.profile())
        if compiled_before:
            stack_of.enter_context(mock.patch("torch.compiler.reset"))
        train(model, schedule, steps=8)
    assert not profiles or profile.events()
    assert schedule.is_settled
    assert schedule.schedule is None
    return schedule.reason


def test_ranks_that_share_memory_keep_the_options(run_ranks):
    for reason in run_ranks(2, _stays, "shared_memory"):
        assert reason == "the options stay: ranks share memory, where gathers move nothing"


def _one_profiles():
    return _stays("c10d", dist.get_rank() == 1)


def test_no_rank_measures_where_one_runs_a_profiler_of_its_own(run_ranks):
    for reason in run_ranks(2, _one_profiles):
        assert "another profiler was running" in reason


def test_a_model_that_was_compiled_before_is_told(run_ranks):
    for reason in run_ranks(2, _stays, "c10d", False, True):
        assert "the model was compiled before MeasuredSchedule was made" in reason


def _misused():
    with pytest.raises(TypeError, match="MeasuredSchedule takes a module"):
        MeasuredSchedule(3)
    with pytest.raises(Zero3Error, match="no parameter of the Linear is sharded"):
        MeasuredSchedule(nn.Linear(2, 2))
    for name in ("skip", "steps", "turns"):
        with pytest.raises(ValueError, match=f"{name} is a positive integer, got 0"):
            MeasuredSchedule(stack(), **{name: 0})
    grid = dist.device_mesh.init_device_mesh("cpu", (2, 1))
    with pytest.raises(Zero3Error, match="over several meshes, or over one of several dimensions"):
        MeasuredSchedule(fully_shard(nn.Linear(2, 2), mesh=grid))


def test_errors_say_what_is_wrong(run_ranks):
    run_ranks(2, _misused)


def _measured(inductor):
    """Measures everything."""
    options = {"keep_mb": 0.5, "inductor": inductor}
    expected, _ = train(stack(width=256), options=options)
    model = stack(width=256)
    before = torch.get_rng_state()
    schedule = MeasuredSchedule(model)
    losses, _ = train(model, schedule, options=options)
    assert schedule.is_settled
    assert losses == expected
    assert torch.equal(torch.get_rng_state(), before)
    return schedule.schedule, schedule.reason


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=INDUCTOR_TOO)])
def test_machine_and_steps_are_measured(run_ranks, inductor):
    first, second = run_ranks(2, _measured, inductor)
    assert first == second
    assert "of a step" in first[1]
