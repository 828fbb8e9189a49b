"""``MeasuredSchedule`` takes what was free beside the measured steps, and no more."""

import pytest
from support.measured_schedules import known, stack, train

from deepcompile_zero3 import MeasuredSchedule


def _keeps(free_models):
    """Returns whether parameters stay gathered, if so many whole models fit in what is free."""
    model = stack(depth=3)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    with known(0.8, free=free_models * whole):
        schedule = MeasuredSchedule(model, skip=1, steps=1, turns=1)
        train(model, schedule, steps=6)
    assert schedule.is_settled
    return schedule.schedule is not None and schedule.schedule.keep_mb > 0


@pytest.mark.parametrize(("free_models", "expected"), [(0, False), (1, True)])
def test_parameters_stay_gathered_if_they_fit_in_what_was_free_beside_a_step(
    run_ranks, free_models, expected
):
    # The step itself, with states of the optimizer and buffers, takes far more than one model.
    assert run_ranks(2, _keeps, free_models) == [expected] * 2
