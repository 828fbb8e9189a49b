"""Finds a schedule for graphs that ran, by simulating steps at the speed that was measured."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import fx

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.capture import CapturedGraph, CapturedGraphs
from deepcompile_zero3.options import Schedule
from deepcompile_zero3.passes.pipeline import Pipeline
from deepcompile_zero3.tools.planning.graphs import Trace
from deepcompile_zero3.tools.planning.kernels import kernels_of
from deepcompile_zero3.tools.planning.machine import Link, Machine
from deepcompile_zero3.tools.planning.simulate import Slower, simulate
from deepcompile_zero3.tools.scheduling.measured_step import MeasuredStep
from deepcompile_zero3.tools.tracing.ran import Ran, on_all_ranks
from deepcompile_zero3.transport.json_collectives import all_gather_json

_STEPS_OF_FIT = 6  # each halves the interval of the link's factor, in logarithms
_WIDEST = 16.0  # the link may be so many times slower or quicker than when measured alone
_SMALLEST_BUCKET = 1.0  # MiB
_MOST_AHEAD = 4
_WORTH = 0.002  # fraction of a step: a change that saves less is left out


@dataclass(frozen=True)
class Predicted:
    """A simulated step: seconds, seconds that it waits, and bytes at the peak."""

    seconds: float
    waiting: float
    peak: float


class Search:
    """Predicts steps of the graphs that ran, with other schedules. Collective from the beginning.

    Args:
        ran: what ran in the measured step.
        machine: the machine, the same on all ranks.
        step: the measured step, the same on all ranks.
        optimizer_bytes: bytes of the optimizer's state for each element of a shard.
        group: process group of the ranks.
    """

    def __init__(
        self,
        ran: Ran,
        machine: Machine,
        step: MeasuredStep,
        optimizer_bytes: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._ran = ran
        self._machine = machine
        self._optimizer_bytes = optimizer_bytes
        self._group = group
        self._slower = Slower()
        forwards = [(*_source_of(graph), False) for graph in ran.graphs.forward]
        backwards = [(*_source_of(graph), True) for graph in ran.graphs.backward]
        self._trace = Trace(ran.parameters, (), forwards + backwards)
        self.options = forwards[0][0].options
        self._fit(step)

    def predict(self, schedule: Schedule) -> Predicted:
        """Returns a step with ``schedule`` in place of the measured one. Not collective."""
        return self._simulate(self._trace.rewrite(self.options.with_schedule(schedule)))

    def _simulate(self, graphs: CapturedGraphs) -> Predicted:
        step = simulate(
            graphs,
            self._ran.parameters,
            self._machine,
            optimizer_bytes=self._optimizer_bytes,
            slower=self._slower,
        ).timeline
        waiting = step.seconds("waiting")
        seconds = step.seconds("compute", "waiting")
        return Predicted(seconds, waiting, sum(step.peak.values()))

    def best(self, most_bytes: float) -> tuple[Schedule, float]:
        """Returns the quickest schedule found, and the seconds of a step that it saves. Collective.

        Args:
            most_bytes: bytes that it may take beyond the peak of the measured schedule.
        """
        best = self.options.schedule
        now = start = self._as_it_ran()
        for candidates in (self._keeps, self._buckets, self._aheads):
            schedules = candidates(best)
            predicted = self._of_ranks(functools.partial(self._predict_all, schedules))
            for schedule, each in zip(schedules, predicted, strict=True):
                fits = each.peak - start.peak <= most_bytes
                if fits and each.seconds < now.seconds * (1 - _WORTH):
                    best, now = schedule, each
        return best, start.seconds - now.seconds

    def _of_ranks(self, simulate: Callable[[], list[Predicted]]) -> list[Predicted]:
        """Returns the predictions of the slowest and largest rank. Collective."""
        mine = on_all_ranks("MeasuredSchedule", simulate, self._group)
        numbers = [[each.seconds, each.waiting, each.peak] for each in mine]
        told = all_gather_json("MeasuredSchedule", numbers, self._group)
        return [
            Predicted(*map(max, zip(*of_ranks, strict=True)))
            for of_ranks in zip(*told, strict=True)
        ]

    def _predict_all(self, schedules: Sequence[Schedule]) -> list[Predicted]:
        return [self.predict(each) for each in schedules]

    def _as_it_ran(self) -> Predicted:
        """Returns the measured step as it is simulated. Collective."""
        [predicted] = self._of_ranks(lambda: [self._simulate(self._ran.graphs)])
        return predicted

    # ---- candidates

    def _keeps(self, schedule: Schedule) -> list[Schedule]:
        models = {each.model for each in self._ran.parameters.values()} - {None}
        whole = math.ceil(sum(model.nbytes for model in models if model) / 2**20)
        sizes = [whole, whole // 2, whole // 4]
        return [schedule._replace(keep_mb=size) for size in sizes if size > schedule.keep_mb]

    def _buckets(self, schedule: Schedule) -> list[Schedule]:
        sizes = [schedule.gather_bucket_mb * factor for factor in (1 / 16, 1 / 4, 4)]
        return [
            schedule._replace(gather_bucket_mb=size) for size in sizes if size >= _SMALLEST_BUCKET
        ]

    def _aheads(self, schedule: Schedule) -> list[Schedule]:
        several = range(schedule.gathers_ahead + 1, _MOST_AHEAD + 1)
        return [schedule._replace(gathers_ahead=ahead) for ahead in several]

    # ---- the measured step

    def _fit(self, step: MeasuredStep) -> None:
        """Makes kernels and links as slow as they were in the measured step. Collective."""
        forward, backward = map(
            self._seconds, (self._ran.graphs.forward, self._ran.graphs.backward)
        )
        self._slower = Slower(
            step.forward / forward if forward and step.forward else 1.0,
            step.backward / backward if backward and step.backward else 1.0,
        )
        alone = self._machine
        low, high = -math.log(_WIDEST), math.log(_WIDEST)
        for _ in range(_STEPS_OF_FIT):
            middle = (low + high) / 2
            self._machine = _with_links(alone, math.exp(middle))
            if self._as_it_ran().waiting < step.waiting:
                low = middle
            else:
                high = middle
        self._machine = _with_links(alone, math.exp((low + high) / 2))

    def _seconds(self, graphs: Sequence[CapturedGraph]) -> float:
        """Returns the seconds of the graphs' kernels by the machine's model."""
        kernels = (kernel for graph in graphs for kernel in kernels_of(graph.inlined.graph))
        of = self._machine.seconds_of_kernel
        return sum(of(kernel.flops, kernel.dtype, kernel.nbytes) for kernel in kernels)


def _source_of(graph: CapturedGraph) -> tuple[Pipeline, fx.GraphModule]:
    if graph.source is None:
        raise Zero3Error("a graph was captured without its source")
    return graph.source


def _with_links(machine: Machine, factor: float) -> Machine:
    """Returns the machine with links that take ``factor`` times as long."""
    local, remote = (
        Link(link.latency * factor, link.bandwidth / factor)
        for link in (machine.local, machine.remote)
    )
    return replace(machine, local=local, remote=remote)
