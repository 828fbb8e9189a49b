"""The file of a ``MeasuredSchedule``, from which later runs take the choice."""

import json
import warnings
from unittest import mock

import pytest
import torch.distributed as dist
from support.measured_schedules import chosen, stack, train
from torch._dynamo.exc import BackendCompilerFailed

from deepcompile_zero3 import MeasuredSchedule, Schedule, Zero3Error
from deepcompile_zero3.graph.recording import is_recording_graphs
from deepcompile_zero3.tools.scheduling import measured_schedule


def _twice(file):
    first, *_ = chosen(0.8, file=file)
    model = stack()
    schedule = MeasuredSchedule(model, file)
    assert schedule.is_settled
    assert not is_recording_graphs()
    assert schedule.reason.startswith(f"taken from {file}: 1,")
    with pytest.raises(BackendCompilerFailed, match="MeasuredSchedule takes no account"):
        train(model, options={"inductor": False, "activations_mb": 8}, steps=1)
    _, gathers = train(model, schedule, steps=2)
    return first, schedule.schedule, gathers


@pytest.mark.more
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
    chosen(1.2, file=file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = MeasuredSchedule(stack(depth=3), file)
    assert not schedule.is_settled
    caught = [each for each in caught if "MeasuredSchedule" in str(each.message)]
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.more
def test_a_file_of_another_model_is_told_and_replaced(run_ranks, tmp_path):
    told, nothing = run_ranks(2, _another_model, str(tmp_path / "schedule.json"))
    assert len(told) == 1
    assert "is of another model, number of ranks or version" in told[0]
    assert nothing == []


def _unreadable(file):
    with pytest.raises(Zero3Error, match=r"is not one of its files .*: remove it"):
        MeasuredSchedule(stack(), file)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"model": "", "options": 3}'])
def test_a_file_of_something_else_is_an_error_on_all_ranks(run_ranks, tmp_path, text):
    (tmp_path / "schedule.json").write_text(text)
    run_ranks(2, _unreadable, str(tmp_path / "schedule.json"))


def _stays_in_file(file):
    measured = MeasuredSchedule(stack(), file)
    options = Schedule(gather_bucket_mb=4.0, gathers_ahead=1, keep_mb=0.0)
    measured._settle(None, "the options stay: simulations save 0.5% at best", saves=options)
    dist.barrier()
    with mock.patch.object(measured_schedule.os, "access", return_value=False):
        later = MeasuredSchedule(stack(), file)
        with pytest.raises(Zero3Error, match="is no folder that can be written to"):
            MeasuredSchedule(stack(depth=3), file)
    assert later.schedule == options
    said = "the options of the run that measured: simulations save 0.5% at best"
    assert later.reason == f"taken from {file}: {said}"


def test_a_choice_is_taken_from_a_folder_that_cannot_be_written_to(run_ranks, tmp_path):
    run_ranks(2, _stays_in_file, str(tmp_path / "schedule.json"))
