"""``MeasuredSchedule``: chooses, from steps of a training run, how its graphs gather."""

import hashlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.capture import CapturedGraphs, capture_graphs
from deepcompile_zero3.options import Schedule
from deepcompile_zero3.runtime import release_buffers
from deepcompile_zero3.sharding.registered import all_parameters_of
from deepcompile_zero3.tools.planning.machine import Machine
from deepcompile_zero3.tools.planning.measure import measure_device, measure_links
from deepcompile_zero3.tools.scheduling.measured_step import free_bytes, measured_step
from deepcompile_zero3.tools.scheduling.search import Search
from deepcompile_zero3.tools.tracing.profile import Event, events_in, median_step
from deepcompile_zero3.tools.tracing.ran import line_of, on_all_ranks, what_ran
from deepcompile_zero3.transport.json_collectives import all_gather_json

_WORTH = 0.01  # fraction of a step that a schedule has to save, by the clock
_TRIED = 0.02  # fraction of a step that it has to save in the simulation, to be tried
_VERSION = 1  # of the file


class MeasuredSchedule:
    """Chooses from measured steps when a model's compiled graphs gather, and how much at once.

    ::

        schedule = MeasuredSchedule(model, "schedule.json")
        compiled = torch.compile(model, backend="zero3")
        for tokens in batches:
            compiled(tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    Some steps are profiled. Simulations of the same graphs at the measured speeds then try other
    values of the backend's options ``gather_bucket_mb``, ``gathers_ahead`` and ``keep_mb``, within
    the memory that was free. The best one is compiled, once, and takes turns with the first one; by
    the clock, the quicker of the two stays. All of this happens in steps that train: a schedule
    changes no result. Ranks decide by numbers that they exchange. From there on nothing changes.

    The choice is written to ``file``. A later run with the same model and number of ranks takes it
    from there, and measures nothing.

    Args:
        model: a model sharded by ``fully_shard``, over one mesh of one dimension. Call this after
            ``fully_shard`` and before the model is compiled. Collective over the mesh.
        file: a path of a JSON file, or None to save nothing. The first rank of the mesh reads and
            writes it.
        skip: steps before the profile, in which graphs are compiled.
        steps: steps that are profiled.
        turns: steps that each of the two schedules takes when they are compared.

    Attributes:
        is_settled: whether the choice is made.
        schedule: the chosen schedule; None before, and if the options of ``torch.compile`` stay.
        reason: why it was chosen, with the numbers, in a line.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``skip``, ``steps`` or ``turns`` is not positive.
        Zero3Error: no parameter is sharded, or parameters lie on several meshes or dimensions.
    """

    def __init__(
        self,
        model: nn.Module,
        file: str | os.PathLike | None = None,
        *,
        skip: int = 3,
        steps: int = 3,
        turns: int = 6,
    ) -> None:
        self._parameters = all_parameters_of(model, "MeasuredSchedule")
        for name, value in {"skip": skip, "steps": steps, "turns": turns}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"MeasuredSchedule: {name} is a positive integer, got {value!r}")
        meshes = {parameter.layout.ranks.mesh for parameter in self._parameters}
        if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
            raise Zero3Error(
                "MeasuredSchedule: the model is sharded over several meshes, or over one of "
                "several dimensions, for which steps are not simulated"
            )
        [self._mesh] = meshes
        self._group = self._mesh.get_group()
        self._file = None if file is None else Path(file)
        self._skip, self._steps, self._turns = skip, steps, turns
        self.is_settled = False
        self.schedule: Schedule | None = None
        self.reason = "not chosen yet"
        self._phases = self._choose()
        self._load()
        next(self._phases, None)

    def step(self) -> None:
        """Call at the end of each training step, on all ranks. Collective until it is settled."""
        next(self._phases, None)

    def __repr__(self) -> str:
        return f"MeasuredSchedule({self.schedule}): {self.reason}"

    # ---- phases: each `yield` is a training step

    def _choose(self) -> Iterator[None]:
        if self.is_settled:
            return
        with capture_graphs(sources=True) as graphs:
            for _ in range(self._skip):
                yield
            profiled: list[list[Event]] = []
            yield from self._profile(profiled)
        try:
            first, best, saved = self._search(graphs, profiled)
        except Zero3Error as error:
            self._settle(None, f"the options stay: {error}")
            return
        del graphs, profiled
        if best == first:
            self._settle(None, f"the options stay: at best, {saved} was to be saved")
            return
        self._apply(best)
        for _ in range(2):  # the first one compiles
            yield
        took: dict[Schedule, list[float]] = {first: [], best: []}
        for number in range(2 * self._turns):
            now = best if number % 4 in (0, 3) else first
            self._apply(None if now is first else now)  # whose graphs are there
            start = self._clock()
            yield
            took[now].append(self._clock() - start)
        mine = [statistics.median(took[each]) for each in (first, best)]
        told = all_gather_json("MeasuredSchedule", mine, self._group)
        before, after = (max(each) for each in zip(*told, strict=True))
        text = (
            f"a step takes {after * 1e3:,.1f} ms with {best}, and {before * 1e3:,.1f} with {first}"
        )
        if after < before * (1 - _WORTH):
            self._settle(best, f"{text}; {saved} was predicted to be saved")
        else:
            self._settle(None, f"the options stay: {text}, though {saved} was to be saved")

    def _profile(self, profiled: list[list[Event]]) -> Iterator[None]:
        """Adds the events of a profile; adds nothing if another profiler runs."""
        profile = None
        if not torch_internals.profiler_is_running():  # torch would end it
            profile = torch.profiler.profile(
                schedule=self._action,
                on_trace_ready=lambda profile: profiled.append(events_in(profile)),
            )
            profile.start()
        for _ in range(self._steps):
            yield
            self._clock()  # kernels that a step launched end in it
            if profile is not None:
                profile.step()
        if profile is not None:
            profile.stop()

    def _action(self, number: int) -> torch.profiler.ProfilerAction:
        """Returns what a profile does in step ``number``: it begins at once, without a warm-up."""
        Action = torch.profiler.ProfilerAction
        if number == self._steps - 1:
            return Action.RECORD_AND_SAVE
        return Action.RECORD if number < self._steps else Action.NONE

    def _search(
        self, graphs: CapturedGraphs, profiled: list[list[Event]]
    ) -> tuple[Schedule, Schedule, str]:
        """Returns the first schedule, the best one, and what it would save. Collective."""

        def look() -> tuple:
            if not profiled:
                raise Zero3Error("another profiler was running, and no step was profiled")
            if not graphs.forward:
                raise Zero3Error(
                    "the model was compiled before MeasuredSchedule was made: make it first"
                )
            [events] = profiled
            step = median_step(events)
            ran = what_ran(graphs, events, step)
            if ran.share_memory:
                raise Zero3Error("ranks share memory, where gathers move nothing")
            return ran, measured_step(events, step, ran.times)

        ran, mine = on_all_ranks("MeasuredSchedule", look, self._group)
        step = mine.agreed(self._group)
        free = free_bytes(torch.device(self._mesh.device_type), self._group)
        search = Search(ran, self._machine(), step, 8, self._group)
        best, seconds = search.best(free)
        first = search.options.schedule
        saved = seconds * ran.times / step.whole
        return first, best if saved >= _TRIED else first, f"{saved:.1%} of a step"

    def _machine(self) -> Machine:
        """Measures the machine and its links, without a trace. Collective."""
        device = torch.device(self._mesh.device_type)
        devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
        with torch.random.fork_rng(devices), torch.enable_grad():
            alone = on_all_ranks(
                "MeasuredSchedule",
                lambda: measure_device(device, "these ranks", (torch.float32,)),
                self._group,
            )
            machine = measure_links(self._mesh, alone)
        release_buffers()
        return machine

    def _clock(self) -> float:
        if self._mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _apply(self, schedule: Schedule | None) -> None:
        for parameter in self._parameters:
            parameter.schedule = schedule
            parameter.update_guard_key()

    def _settle(self, schedule: Schedule | None, reason: str) -> None:
        self._apply(schedule)
        self.schedule, self.reason, self.is_settled = schedule, reason, True
        if self._file is not None and self._group.rank() == 0:
            self._save(self._file)

    # ---- the file

    @property
    def _key(self) -> str:
        """A key of the model and its sharding."""
        described = [
            [each.fqn, str(tuple(each.shard.shape)), str(each.compute_dtype)]
            for each in self._parameters
        ]
        text = json.dumps([self._mesh.size(), self._mesh.device_type, described])
        return hashlib.sha256(text.encode()).hexdigest()

    def _save(self, file: Path) -> None:
        schedule = None if self.schedule is None else self.schedule._asdict()
        saved = {"version": _VERSION, "model": self._key, "options": schedule}
        saved["reason"] = self.reason
        new = file.with_name(file.name + ".new")
        try:
            new.write_text(json.dumps(saved, indent=2) + "\n")
            new.replace(file)
        except OSError as error:
            warnings.warn(f"MeasuredSchedule: nothing was saved: {error}", stacklevel=5)

    def _load(self) -> None:
        """Takes the choice of an earlier run, if there is one. Collective."""

        def read() -> Any:
            if self._file is None or self._group.rank() > 0 or not self._file.exists():
                return None
            try:
                saved = json.loads(self._file.read_text())
                found = saved["version"], saved["model"]
                options = saved["options"] and Schedule(**saved["options"])
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise Zero3Error(
                    f"MeasuredSchedule: {self._file} is not one of its files "
                    f"({line_of(error)}): remove it"
                ) from error
            if found != (_VERSION, self._key):
                warnings.warn(
                    f"MeasuredSchedule: {self._file} is of another model, number of ranks or "
                    "version: steps are measured anew, and it is replaced",
                    stacklevel=4,
                )
                return None
            return [options]

        mine = on_all_ranks("MeasuredSchedule", read, self._group)
        saved = all_gather_json("MeasuredSchedule", mine, self._group)[0]
        if saved is not None:
            [options] = saved
            schedule = None if options is None else Schedule(*options)
            self._apply(schedule)
            self.schedule, self.is_settled = schedule, True
            self.reason = f"taken from {self._file}"
