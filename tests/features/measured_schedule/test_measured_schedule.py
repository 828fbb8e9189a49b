"""``MeasuredSchedule``: ranks choose one schedule from measured steps, and no number changes.

Most tests replace the clocks of ranks and the machine's numbers, so that they know what is best.
"""

import os
import re
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.extensions import Bf16Gathered, wrap
from support.measured_schedules import OPTIONS, STEPS, chosen, known, stack, train
from support.models import INDUCTOR_TOO, batch_of, mean_square, mine
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from deepcompile_zero3 import FileOffloadPolicy, MeasuredSchedule, Zero3Error, fully_shard
from deepcompile_zero3.graph.recording import is_recording_graphs
from deepcompile_zero3.sharding.module_parameters import registered_in
from deepcompile_zero3.tools.scheduling import measured_schedule


@pytest.mark.parametrize(
    ("ranks", "micro_batches"),
    [
        pytest.param(4, 1, marks=pytest.mark.more),
        pytest.param(2, 2, marks=pytest.mark.long),
    ],
)
def test_ranks_agree_on_a_quicker_schedule_whatever_their_clocks_say(
    run_ranks, ranks, micro_batches
):
    of_ranks = run_ranks(ranks, chosen, 0.8, micro_batches)
    assert len(set(of_ranks)) == 1
    schedule, reason, gathers, fewer = of_ranks[0]
    assert schedule.keep_mb > 0
    assert fewer < gathers
    assert re.fullmatch(
        r"1,.* ms with gather_.*, .* ms with gather_.* \(-.*%, predicted -.*%\)", reason
    )


@pytest.mark.more
def test_a_schedule_that_the_clock_does_not_find_quicker_is_taken_back(run_ranks):
    for schedule, reason, gathers, fewer in run_ranks(2, chosen, 1.2):
        assert schedule is None
        assert re.match(r"the options stay: .* ms with gather_bucket_mb=4, .*\(\+", reason)
        assert fewer == gathers


def _stays(case):
    model = stack("shared_memory" if case == "shared memory" else "c10d")
    if case == "compiled before":
        train(model, steps=1)
    file = "/nowhere/unused.json" if case == "shared memory" else "unused.json"
    schedule = MeasuredSchedule(model, file)
    run = torch.compile(model, backend="zero3", options=OPTIONS)
    if case != "compiled before":
        torch.compiler.reset()
    for number in range(8):
        loss = mean_square(run, mine(batch_of(4, 32, seed=number)))
        if case == "forward twice":
            loss = loss + mean_square(run, mine(batch_of(4, 32, seed=number)))
        loss.backward()
        if case == "evaluation":
            with torch.no_grad():
                run(mine(batch_of(4, 32, seed=number)))
        schedule.step()
    assert schedule.is_settled
    assert schedule.schedule is None
    assert not is_recording_graphs()
    assert not os.path.exists("unused.json")  # a later run may measure
    return schedule.reason


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param(
            "shared memory",
            "ranks share memory, where gathers move nothing",
            marks=pytest.mark.gloo,
        ),
        pytest.param(
            "compiled before",
            "the model was compiled before MeasuredSchedule was made: make it first",
            marks=pytest.mark.more,
        ),
        ("forward twice", "graphs do not run once each and then their backwards"),
        pytest.param(
            "evaluation",
            "graphs do not run once each and then their backwards",
            marks=pytest.mark.more,
        ),
    ],
)
def test_the_options_stay_where_steps_cannot_be_simulated(run_ranks, case, reason):
    for told in run_ranks(2, _stays, case):
        assert told.startswith(f"the options stay: {reason}")


def _short():
    model = stack()
    schedule = MeasuredSchedule(model)
    train(model, schedule, steps=4)
    assert is_recording_graphs()
    del schedule
    assert not is_recording_graphs()


def test_training_may_end_before_the_choice(run_ranks):
    run_ranks(2, _short)


def _dropped_while_two_are_compared():
    model = stack()
    with known(0.8):
        schedule = MeasuredSchedule(model)
        train(model, schedule, steps=7)
        parameter = registered_in(model)[0]
        assert (applied := parameter.schedule) is not None
        with pytest.raises(Zero3Error, match="another one of this model"):
            MeasuredSchedule(model)
        del schedule  # at another time on each rank, if it is in a cycle
    assert parameter.schedule == applied
    MeasuredSchedule(model)
    assert parameter.schedule is None


@pytest.mark.more
def test_a_schedule_that_is_dropped_changes_nothing(run_ranks):
    run_ranks(2, _dropped_while_two_are_compared)


def _beside_another():
    measured, other = stack(), stack(depth=3)
    schedule = MeasuredSchedule(measured)
    options = {"inductor": False, "activations_mb": 8}
    for model, message in ((measured, "MeasuredSchedule takes no account"), (other, "on a CPU")):
        with pytest.raises(BackendCompilerFailed, match=message):
            train(model, options=options, steps=1)
    assert not schedule.is_settled


def test_other_models_may_have_options_that_it_refuses(run_ranks):
    run_ranks(2, _beside_another)


def _raising():
    model = stack()
    schedule = MeasuredSchedule(model)
    error = MemoryError("none left")
    with known(0.8), mock.patch.object(measured_schedule, "free_bytes", side_effect=error):
        with pytest.raises(MemoryError):
            train(model, schedule)
        schedule.step()
    assert schedule.is_settled
    assert schedule.reason == "the options stay: MemoryError: none left"
    assert not is_recording_graphs()


@pytest.mark.more
def test_an_error_settles_it(run_ranks):
    run_ranks(2, _raising)


def _two():
    model, other = stack(), stack()
    first = MeasuredSchedule(model)
    with pytest.raises(Zero3Error, match="another one of this model"):
        MeasuredSchedule(model.blocks[0])
    second = MeasuredSchedule(other)
    torch.compiler.reset()
    runs = [torch.compile(each, backend="zero3", options=OPTIONS) for each in (model, other)]
    with known(0.8):
        for number in range(STEPS):
            for run, schedule in zip(runs, (first, second), strict=True):
                mean_square(run, mine(batch_of(4, 32, seed=number))).backward()
                schedule.step()
    assert first.is_settled
    assert second.is_settled
    return first.schedule, second.schedule


def _of_extensions():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    wrap(model, Bf16Gathered)
    fully_shard(model, transport="c10d")
    torch.compiler.reset()
    run = torch.compile(model, backend="zero3", options=OPTIONS)
    with known(0.8):
        schedule = MeasuredSchedule(model)
        for number in range(STEPS):
            mean_square(run, mine(batch_of(4, 32, seed=number)).bfloat16()).backward()
            schedule.step()
    return schedule.schedule, schedule.reason


def test_steps_of_parameters_that_are_gathered_as_other_tensors_are_simulated(run_ranks):
    for schedule, reason in run_ranks(2, _of_extensions):
        assert schedule is None  # one gather, which cannot be smaller, and nothing that may be kept
        assert reason == "the options stay: simulations save 0.0% at best"


@pytest.mark.more
def test_two_models_are_measured_side_by_side(run_ranks):
    for first, second in run_ranks(2, _two):
        assert first is not None
        assert first == second


def _misused():
    with pytest.raises(TypeError, match="MeasuredSchedule takes a module"):
        MeasuredSchedule(3)
    with pytest.raises(Zero3Error, match="no parameter of the Linear is sharded"):
        MeasuredSchedule(nn.Linear(2, 2))
    for name in ("skip", "steps", "turns"):
        with pytest.raises(ValueError, match=f"{name} is a positive integer, got 0"):
            MeasuredSchedule(stack(), **{name: 0})
    offloaded = nn.Linear(2, 2)
    fully_shard(offloaded, offload_policy=FileOffloadPolicy(tempfile.gettempdir(), 1))
    with pytest.raises(Zero3Error, match="has a budget of memory"):
        MeasuredSchedule(offloaded)
    with pytest.raises(Zero3Error, match="ranks give other skip, steps or turns"):
        MeasuredSchedule(stack(), skip=1 + dist.get_rank())
    with pytest.raises(Zero3Error, match="is no folder that can be written to"):
        MeasuredSchedule(stack(), "/nowhere/schedule.json")
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


@pytest.mark.more
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=INDUCTOR_TOO)])
def test_machine_and_steps_are_measured(run_ranks, inductor):
    first, second = run_ranks(2, _measured, inductor)
    assert first == second
    assert "simulations save" in first[1] or "predicted" in first[1]
