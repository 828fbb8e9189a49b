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

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.recording import Recording, is_recording, record_graphs
from deepcompile_zero3.options import Options, Schedule
from deepcompile_zero3.runtime import _C, release_buffers
from deepcompile_zero3.sharding.registered import all_parameters_of
from deepcompile_zero3.tools.planning.machine import Machine
from deepcompile_zero3.tools.planning.measure import measure_device, measure_links
from deepcompile_zero3.tools.scheduling.free_memory import free_bytes
from deepcompile_zero3.tools.scheduling.measured_step import RecordedStep, measured_step, times_of
from deepcompile_zero3.tools.scheduling.search import Search
from deepcompile_zero3.transport.json_collectives import all_gather_json, line_of, on_all_ranks

_CALL = "MeasuredSchedule"
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

    Some steps are measured. Simulations of the same graphs at the measured speeds then try other
    values of the backend's options ``gather_bucket_mb``, ``gathers_ahead`` and ``keep_mb``, within
    the memory that was free. The best one is compiled, once, and takes turns with the first one; by
    the clock, the quicker of the two stays. All of this happens in steps that train: a schedule
    changes no result. Ranks decide by numbers that they exchange. From there on nothing changes.

    The choice is written to ``file``. A later run with the same model and number of ranks takes it
    from there, and measures nothing. Until a choice is made, graphs are neither stored in the
    compiler's caches nor loaded; one call of :meth:`step` takes some seconds; and each compiled
    function takes one more entry of Dynamo's ``recompile_limit``.

    Args:
        model: a model sharded by ``fully_shard``, over one mesh of one dimension. Call this after
            ``fully_shard`` and before the model is compiled. Collective over the mesh.
        file: a path of a JSON file, or None to save nothing. The first rank of the mesh reads and
            writes it.
        skip: steps before the first measured one, in which graphs are compiled.
        steps: steps that are measured.
        turns: steps that each of the two schedules takes when they are compared.

    Attributes:
        is_settled: whether the choice is made.
        schedule: the chosen schedule; None before, and if the options of ``torch.compile`` stay.
        reason: why it was chosen, with the numbers, in a line.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``skip``, ``steps`` or ``turns`` is not positive.
        Zero3Error: no parameter is sharded; parameters lie on several meshes or dimensions, or have
            a budget of memory; another schedule of the model measures; ranks give other numbers of
            steps; or ``file`` is something else, or cannot be written.
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
        self._parameters = all_parameters_of(model, _CALL)
        for name, value in {"skip": skip, "steps": steps, "turns": turns}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"MeasuredSchedule: {name} is a positive integer, got {value!r}")
        meshes = {parameter.layout.ranks.mesh for parameter in self._parameters}
        if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
            raise Zero3Error(
                "MeasuredSchedule: the model is sharded over several meshes, or over one of "
                "several dimensions, for which steps are not simulated"
            )
        if any(parameter.memory for parameter in self._parameters):
            raise Zero3Error(
                "MeasuredSchedule: the model has a budget of memory (FileOffloadPolicy), and a "
                "schedule would spend memory beyond it"
            )
        if is_recording(self._parameters):
            raise Zero3Error(
                "MeasuredSchedule: another one measures this model, or a part of it, and is not "
                "settled yet"
            )
        [self._mesh] = meshes
        self._group = self._mesh.get_group()
        self._file = None if file is None else Path(file).absolute()
        self._skip, self._steps, self._turns = skip, steps, turns
        self.is_settled = False
        self.schedule: Schedule | None = None
        self.reason = "not chosen yet"
        self._load()
        self._phases = self._choose()
        next(self._phases, None)

    def step(self) -> None:
        """Call at the end of each training step, on all ranks. Collective until it is settled."""
        try:
            next(self._phases, None)
        except BaseException as error:
            self._settle(None, f"the options stay: {line_of(error)}", is_saved=False)
            raise

    def __repr__(self) -> str:
        return f"MeasuredSchedule({self.schedule}): {self.reason}"

    # ---- phases: each `yield` is a training step

    def _choose(self) -> Iterator[None]:
        if self.is_settled:
            return
        with record_graphs(self._parameters) as recording:
            for _ in range(self._skip):
                yield
            steps: list[RecordedStep] = []
            for _ in range(self._steps):
                recording.runs.clear()
                start, waited = self._clock(), _C.seconds_waited()
                yield
                seconds, waited = self._clock() - start, _C.seconds_waited() - waited
                steps.append(RecordedStep(tuple(recording.runs), seconds, waited))
        try:
            first, best, saved = self._search(recording, steps)
        except Zero3Error as error:
            self._settle(None, f"the options stay: {error}", is_saved=False)
            return
        del recording, steps
        if best == first:
            self._settle(None, f"the options stay: at best, {saved} was to be saved")
            return
        yield from self._compare(first, best, saved)

    def _search(
        self, recording: Recording, steps: list[RecordedStep]
    ) -> tuple[Schedule, Schedule, str]:
        """Returns the first schedule, the best one, and what it would save. Collective."""
        if not all(each.handle.can.sends_messages for each in self._parameters):
            raise Zero3Error("ranks share memory, where gathers move nothing")  # on all ranks
        times = on_all_ranks(_CALL, lambda: times_of(recording, steps), self._group)
        step = None  # on a GPU, the host knows neither what kernels take nor what they wait for
        if self._mesh.device_type == "cpu":
            step = measured_step(steps, times).agreed(self._group)
        free = free_bytes(torch.device(self._mesh.device_type), self._group)
        search = Search(recording, self._parameters, self._machine(), step, self._group)
        best, seconds = search.best(free)
        first = search.options.schedule
        took = statistics.median(step.seconds for step in steps)
        saved = seconds * times / max(all_gather_json(_CALL, took, self._group))
        return first, best if saved >= _TRIED else first, f"{saved:.1%} of a step"

    def _machine(self) -> Machine:
        """Measures the machine and its links, without a trace. Collective."""
        device = torch.device(self._mesh.device_type)
        devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
        # Kernels are made as slow as they were measured, so that one dtype is enough.
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            alone = on_all_ranks(
                _CALL, lambda: measure_device(device, "here", (torch.float32,)), self._group
            )
            machine = measure_links(self._mesh, alone)
        release_buffers()
        return machine

    def _compare(self, first: Schedule, best: Schedule, saved: str) -> Iterator[None]:
        """Compares both schedules by the clock, in turns, and settles."""
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
        told = all_gather_json(_CALL, mine, self._group)
        before, after = (max(each) for each in zip(*told, strict=True))
        new, old = (f"{seconds * 1e3:,.1f} ms" for seconds in (after, before))
        text = f"a step takes {new} with {best}, and {old} with {first}"
        if after < before * (1 - _WORTH):
            self._settle(best, f"{text}; {saved} was predicted to be saved")
        else:
            self._settle(None, f"the options stay: {text}, though {saved} was to be saved")

    def _clock(self) -> float:
        if self._mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _apply(self, schedule: Schedule | None) -> None:
        for parameter in self._parameters:
            parameter.schedule = schedule
            parameter.update_guard_key()

    def _settle(self, schedule: Schedule | None, reason: str, is_saved: bool = True) -> None:
        self._apply(schedule)
        self.schedule, self.reason, self.is_settled = schedule, reason, True
        if is_saved and self._file is not None and self._group.rank() == 0:
            self._save(self._file)
        self._parameters = []  # the model may go

    # ---- the file

    def _key(self) -> str:
        """Returns a key of the model and its sharding."""
        first = self._parameters[0].fqn.partition(".")[0]
        of_model = f"{first}." if ":" in first else ""  # while another model of its class lives
        described = [
            [
                each.fqn.removeprefix(of_model),
                *map(str, (tuple(each.shard.shape), each.compute_dtype)),
                each.shard.requires_grad,
                each.reshard_after_forward,
            ]
            for each in self._parameters
        ]
        text = json.dumps([self._mesh.size(), self._mesh.device_type, described])
        return hashlib.sha256(text.encode()).hexdigest()

    def _save(self, file: Path) -> None:
        options = None if self.schedule is None else self.schedule._asdict()
        saved = {"version": _VERSION, "model": self._key(), "options": options}
        saved["reason"] = self.reason
        new = file.with_name(file.name + ".new")
        try:
            new.write_text(json.dumps(saved, indent=2) + "\n")
            new.replace(file)
        except OSError as error:
            self.reason += f"; it could not be saved: {error}"

    def _load(self) -> None:
        """Takes the choice of an earlier run, if there is one. Collective."""
        counts = [self._skip, self._steps, self._turns]
        if any(theirs != counts for theirs in all_gather_json(_CALL, counts, self._group)):
            raise Zero3Error("MeasuredSchedule: ranks give other skip, steps or turns")
        saved = all_gather_json(_CALL, on_all_ranks(_CALL, self._read, self._group), self._group)
        if saved[0] is not None:
            [options] = saved[0]
            schedule = None if options is None else Schedule(*options)
            self._settle(schedule, f"taken from {self._file}", is_saved=False)

    def _read(self) -> Any:
        """Returns a list with the saved schedule or None, or None if there is no choice yet."""
        file = self._file
        if file is None or self._group.rank() > 0:
            return None
        if not os.access(file.parent, os.W_OK):
            raise Zero3Error(f"MeasuredSchedule: {file.parent} is no folder that can be written to")
        if not file.exists():
            return None
        try:
            saved = json.loads(file.read_text())
            is_ours = (saved["version"], saved["model"]) == (_VERSION, self._key())
            options = None
            if is_ours and saved["options"] is not None:
                options = Options().with_schedule(Schedule(**saved["options"])).schedule
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise Zero3Error(
                f"MeasuredSchedule: {file} is not one of its files ({line_of(error)}): remove it"
            ) from error
        if is_ours:
            return [options]
        warnings.warn(
            f"MeasuredSchedule: {file} is of another model, number of ranks or version: steps are "
            "measured anew, and it is replaced",
            stacklevel=6,
        )
        return None
