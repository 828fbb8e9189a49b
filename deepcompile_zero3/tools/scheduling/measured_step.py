"""What steps of recorded graphs took."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.recording import Recording, Run
from deepcompile_zero3.transport.json_collectives import all_gather_json


class MeasuredStep(NamedTuple):
    """A measured step, in seconds, with each graph run once.

    Attributes:
        forward: seconds that forwards compute.
        backward: seconds that backwards compute.
        waiting: seconds that the step waits for other ranks.
    """

    forward: float
    backward: float
    waiting: float

    def agreed(self, group: dist.ProcessGroup) -> "MeasuredStep":
        """Returns the step of the slowest rank, which is the one that waits least. Collective."""
        steps = [MeasuredStep(*each) for each in all_gather_json("MeasuredSchedule", self, group)]
        forward, backward, _ = map(max, zip(*steps, strict=True))
        return MeasuredStep(forward, backward, min(each.waiting for each in steps))


class RecordedStep(NamedTuple):
    """The runs of graphs in a step, its seconds, and those that it waited for other ranks."""

    runs: Sequence[Run]
    seconds: float
    waited: float


def times_of(recording: Recording, steps: Sequence[RecordedStep]) -> int:
    """Returns how often each graph runs in a step: once for each micro-batch.

    Raises:
        Zero3Error: a simulated step, which runs each forward once and then the backwards, would
            differ from these.
    """
    orders = [[(run.number, run.is_backward) for run in step.runs] for step in steps]
    order = orders[-1]
    if not order:
        raise Zero3Error('no graph of torch.compile(..., backend="zero3") ran in the step')
    if not recording.graphs:
        raise Zero3Error("the model was compiled before MeasuredSchedule was made: make it first")
    if any(each != order for each in orders):
        raise Zero3Error("other graphs ran in one step than in the next")
    if not recording.graphs.keys() >= set(order):
        raise Zero3Error("a graph ran that was compiled before MeasuredSchedule was made")
    forwards = [number for number, is_backward in dict.fromkeys(order) if not is_backward]
    once = [(number, False) for number in forwards]
    once += [(number, True) for number in reversed(forwards)]
    times = len(order) // len(once) if once else 0
    if order != once * times:
        raise Zero3Error(
            "graphs do not run once each and then their backwards, in a step or a micro-batch of it"
        )
    return times


def measured_step(steps: Sequence[RecordedStep], times: int) -> MeasuredStep:
    """Returns the medians of ``steps``, in which each graph ran so many times."""

    def computing(step: RecordedStep, is_backward: bool) -> float:
        runs = (run for run in step.runs if run.is_backward == is_backward)
        return sum(run.seconds - run.waited for run in runs) / times

    return MeasuredStep(
        statistics.median(computing(step, False) for step in steps),
        statistics.median(computing(step, True) for step in steps),
        statistics.median(step.waited / times for step in steps),
    )
