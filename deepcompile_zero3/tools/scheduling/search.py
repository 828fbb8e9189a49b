"""Finds a schedule for recorded graphs, by simulating steps at the speed that was measured."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.capture import CapturedGraph, CapturedGraphs
from deepcompile_zero3.graph.recording import Recording
from deepcompile_zero3.options import Options, Schedule
from deepcompile_zero3.sharding.model import by_fqn
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.source import Source
from deepcompile_zero3.tools.planning.graphs import Trace
from deepcompile_zero3.tools.planning.kernels import kernels_of
from deepcompile_zero3.tools.planning.machine import Link, Machine
from deepcompile_zero3.tools.planning.simulate import Assumptions, Slower, simulate
from deepcompile_zero3.tools.scheduling.measured_step import MeasuredStep
from deepcompile_zero3.transport.json_collectives import all_gather_json
from deepcompile_zero3.transport.on_all_ranks import on_all_ranks

_STEPS_OF_FIT = 6  # each halves the interval of the link's factor, in logarithms
_WIDEST = 16.0  # the link may be so many times slower or quicker than when measured alone
_SMALLEST_BUCKET = 1.0  # MiB
_MAX_AHEAD = 4
_WORTH = 0.002  # fraction of a step: a change that saves less is left out


@dataclass(frozen=True)
class Predicted:
    """A simulated step: seconds, seconds that it waits, and bytes at the peak."""

    seconds: float
    waiting: float
    peak: float


class Search:
    """Predicts steps of recorded graphs with other schedules. Collective from the beginning.

    Args:
        recording: the graphs, of one model.
        parameters: their parameters.
        machine: the machine, the same on all ranks.
        step: the measured step, the same on all ranks; None takes the machine's own speed.
        group: process group of the ranks.

    Raises:
        Zero3Error: graphs were compiled with several schedules, or cannot be simulated.
    """

    def __init__(
        self,
        recording: Recording,
        parameters: Iterable[ShardedParameter],
        machine: Machine,
        step: MeasuredStep | None,
        group: dist.ProcessGroup,
    ) -> None:
        self._machine = machine
        self._group = group
        self._slower = Slower()
        look = functools.partial(self._look, recording, parameters)
        self._graphs, self._trace, self.options = on_all_ranks("MeasuredSchedule", look, group)
        self._models = {each.parameter.model for each in self._trace.sources.values()} - {None}
        if step is not None:
            self._fit(step)

    def _look(
        self, recording: Recording, parameters: Iterable[ShardedParameter]
    ) -> tuple[CapturedGraphs, Trace, Options]:
        """Returns the graphs that ran, rewritten and before that, and their options."""
        graphs, sources, order = CapturedGraphs(), [], []
        for number, is_backward in dict.fromkeys((r.number, r.is_backward) for r in recording.runs):
            graph = recording.graphs[number, is_backward]
            sources.append((graph.pipeline, graph.before, is_backward))
            if not is_backward:
                order.append(number)
            captured = CapturedGraph(graph.after, order.index(number))
            (graphs.backward if is_backward else graphs.forward).append(captured)
            inputs = graph.after.graph.find_nodes(op="placeholder")
            if any(isinstance(node.meta.get("val"), torch.SymInt) for node in inputs):
                raise Zero3Error("a graph is of sizes that change")
        options = [pipeline.options for pipeline, *_ in sources]
        if len({each.schedule for each in options}) > 1:
            raise Zero3Error("graphs of the model were compiled with different options")
        by_name = _by_names_in_graphs(recording, order, parameters)
        return graphs, Trace(by_name, (), sources), options[0]

    def predict(self, schedule: Schedule) -> Predicted:
        """Returns a step with ``schedule`` in place of the measured one. Not collective."""
        return self._simulate(self._trace.rewrite(self.options.with_schedule(schedule)))

    def _simulate(self, graphs: CapturedGraphs) -> Predicted:
        parameters = self._trace.sources
        assumed = Assumptions(self._machine, slower=self._slower)
        step = simulate(graphs, parameters, assumed).timeline
        waiting = step.seconds("waiting")
        seconds = step.seconds("compute", "waiting")
        return Predicted(seconds, waiting, sum(step.peak.values()))

    def best(self, max_bytes: float) -> tuple[Schedule, float]:
        """Returns the quickest schedule found, and the seconds of a step that it saves. Collective.

        Args:
            max_bytes: bytes that it may take beyond the peak of the measured schedule.
        """
        best = self.options.schedule
        now = start = self._as_it_ran()
        for candidates in (self._keeps, self._buckets, self._aheads):
            schedules = candidates(best)
            predicted = self._of_ranks(functools.partial(self._predict_all, schedules))
            for schedule, each in zip(schedules, predicted, strict=True):
                fits = each.peak - start.peak <= max_bytes
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
        [predicted] = self._of_ranks(lambda: [self._simulate(self._graphs)])
        return predicted

    # ---- candidates

    def _keeps(self, schedule: Schedule) -> list[Schedule]:
        whole = math.ceil(sum(model.nbytes for model in self._models if model) / 2**20)
        sizes = [whole, whole // 2, whole // 4]
        return [schedule._replace(keep_mb=size) for size in sizes if size > schedule.keep_mb]

    def _buckets(self, schedule: Schedule) -> list[Schedule]:
        sizes = [schedule.gather_bucket_mb * factor for factor in (1 / 16, 1 / 4, 4)]
        return [
            schedule._replace(gather_bucket_mb=size) for size in sizes if size >= _SMALLEST_BUCKET
        ]

    def _aheads(self, schedule: Schedule) -> list[Schedule]:
        several = range(schedule.gathers_ahead + 1, _MAX_AHEAD + 1)
        return [schedule._replace(gathers_ahead=ahead) for ahead in several]

    # ---- the measured step

    def _fit(self, step: MeasuredStep) -> None:
        """Makes kernels and links as slow as they were in the measured step. Collective."""
        slower = on_all_ranks("MeasuredSchedule", lambda: self._slower_than(step), self._group)
        told = all_gather_json("MeasuredSchedule", slower, self._group)
        self._slower = Slower(*map(max, zip(*told, strict=True)))
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

    def _slower_than(self, step: MeasuredStep) -> Slower:
        forward = self._seconds(self._graphs.forward)
        backward = self._seconds(self._graphs.backward)
        return Slower(
            step.forward / forward if forward and step.forward > 0 else 1.0,
            step.backward / backward if backward and step.backward > 0 else 1.0,
        )

    def _seconds(self, graphs: Sequence[CapturedGraph]) -> float:
        """Returns the seconds of the graphs' kernels by the machine's model."""
        kernels = (kernel for graph in graphs for kernel in kernels_of(graph.inlined.graph))
        of = self._machine.seconds_of_kernel
        return sum(of(kernel.flops, kernel.dtype, kernel.nbytes) for kernel in kernels)


def _by_names_in_graphs(
    recording: Recording, numbers: Iterable[int], parameters: Iterable[ShardedParameter]
) -> dict[str, Source]:
    """Returns sources by their FQNs in graphs, which may be those of a model that is alike."""
    result: dict[str, Source] = {}
    for number in numbers:
        inputs = recording.graphs[number, False].pipeline.inputs.values()
        read = zip(inputs, recording.read[number], strict=True)
        result |= {facts.fqn: parameter for facts, parameter in read}
    found = set(result.values())
    others = by_fqn(parameters).items()
    return {fqn: parameter for fqn, parameter in others if parameter not in found} | result


def _with_links(machine: Machine, factor: float) -> Machine:
    """Returns the machine with links that take ``factor`` times as long."""
    local, remote = (
        Link(link.latency * factor, link.bandwidth / factor)
        for link in (machine.local, machine.remote)
    )
    return replace(machine, local=local, remote=remote)
