"""What ranks make of the steps that each of them has measured."""

import torch.distributed as dist

from deepcompile_zero3.tools.scheduling.measured_step import MeasuredStep


def _agree():
    quick, slow = MeasuredStep(1.0, 2.0, 0.75), MeasuredStep(1.5, 2.125, 0.25)
    for slowest in range(2):
        mine = slow if dist.get_rank() == slowest else quick
        assert mine.agreed(dist.group.WORLD) == slow


def test_ranks_agree_on_the_step_of_the_slowest_which_waits_least(run_ranks):
    run_ranks(2, _agree)
