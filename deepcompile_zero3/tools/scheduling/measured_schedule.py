"""``MeasuredSchedule``: chooses, from steps of a training run, how its graphs gather."""

import hashlib
import json
import logging
import os
import statistics
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.recording import Recording, record_graphs
from deepcompile_zero3.options import Options, Schedule
from deepcompile_zero3.runtime import _C, release_buffers
from deepcompile_zero3.sharding.module_parameters import all_parameters_of
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.tools.planning.machine import Machine
from deepcompile_zero3.tools.planning.measure import measure_device, measure_links
from deepcompile_zero3.tools.scheduling.free_memory import free_bytes
from deepcompile_zero3.tools.scheduling.measured_step import RecordedStep, measured_step, times_of
from deepcompile_zero3.tools.scheduling.search import Search
from deepcompile_zero3.transport.json_collectives import all_gather_json
from deepcompile_zero3.transport.on_all_ranks import ErrorOnARank, line_of, on_all_ranks

_CALL = "MeasuredSchedule"
_STAY = "the options stay"  # begins the reason, where no other schedule was chosen
_WORTH = 0.01  # fraction of a step that a schedule has to save, by the clock
_TRIED = 0.02  # fraction of a step that it has to save in the simulation, to be tried
_VERSION = 1  # version of the file's format


_log = logging.getLogger(__name__)
_MEASURING = 400 * 2**20  # bytes that measuring the machine takes
_unsettled: "weakref.WeakSet[MeasuredSchedule]" = weakref.WeakSet()


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
    compiler's caches nor loaded, but for those of a schedule that is tried; one call of
    :meth:`step` takes some seconds; and each compiled function takes one more entry of Dynamo's
    ``recompile_limit``.

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
            a budget of memory; another schedule of the model is not settled; ranks give other
            numbers of steps; or ``file`` is something else, or is to be written and cannot.
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
        if any(parameter.budget for parameter in self._parameters):
            raise Zero3Error(
                "MeasuredSchedule: the model has a budget of memory (FileOffloadPolicy), and a "
                "schedule would spend memory beyond it"
            )
        [self._mesh] = meshes
        self._group = self._mesh.get_group()
        self._file = None if file is None else Path(file).absolute()
        self._skip, self._steps, self._turns = skip, steps, turns
        self.is_settled = False
        self.schedule: Schedule | None = None
        self.reason = "not chosen yet"
        self._load()
        self._phases: Iterator[None] = iter(())
        if not self.is_settled:
            # The generator has no reference to this object: both go with the last one to it.
            self._phases = MeasuredSchedule._choose(weakref.proxy(self), self._parameters)
            _apply(self._parameters, None)
            _unsettled.add(self)
            next(self._phases)

    def step(self) -> None:
        """Call after each step of the optimizer, on all ranks. Collective until it is settled."""
        try:
            next(self._phases, None)
        except BaseException as error:
            self._settle(None, f"{_STAY}: {line_of(error)}")
            raise

    def __repr__(self) -> str:
        return f"MeasuredSchedule: {self.reason}"

    # ---- phases: each `yield` is a training step

    def _choose(self, parameters: Sequence[ShardedParameter]) -> Iterator[None]:
        with record_graphs(parameters) as recording:
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
        except ErrorOnARank as error:
            self._settle(None, f"{_STAY}: {error}")
            if self._group.rank() == 0:
                _log.warning("MeasuredSchedule: %s", self.reason)
            return
        del recording, steps
        if best == first:
            reason = f"{_STAY}: simulations save {saved} at best"
            self._settle(None, reason, saves=first)
            return
        # If this is dropped, what was applied last stays, alike on all ranks: they collect
        # garbage at different times.
        yield from MeasuredSchedule._compare(self, parameters, first, best, saved)

    def _search(
        self, recording: Recording, steps: list[RecordedStep]
    ) -> tuple[Schedule, Schedule, str]:
        """Returns the first schedule, the best one, and what it would save. Collective."""
        times = on_all_ranks(_CALL, lambda: times_of(recording, steps), self._group)
        step = None  # on a GPU, the host knows neither what kernels take nor what they wait for
        if self._mesh.device_type == "cpu":
            step = measured_step(steps, times).agreed(self._group)
        free = free_bytes(torch.device(self._mesh.device_type), self._group)
        if free < _MEASURING:
            raise ErrorOnARank(f"{free / 2**20:,.0f} MiB of memory are free, too few to measure")
        search = Search(recording, self._parameters, self._machine(), step, self._group)
        best, seconds = search.best(free)
        first = search.options.schedule
        took = statistics.median(step.seconds for step in steps)
        saved = seconds * times / max(all_gather_json(_CALL, took, self._group))
        return first, best if saved >= _TRIED else first, f"{saved:.1%}"

    def _machine(self) -> Machine:
        """Measures the machine and its links. Keeps the random state. Collective."""
        device = torch.device(self._mesh.device_type)
        devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
        dtypes = [torch.float32, torch.bfloat16]
        if device.type == "cpu":  # where kernels are made as slow as they were measured
            dtypes.pop()
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            alone = on_all_ranks(_CALL, lambda: measure_device(device, "here", dtypes), self._group)
            machine = measure_links(self._mesh, alone)
        release_buffers()
        return machine

    def _compare(
        self, parameters: Sequence[ShardedParameter], first: Schedule, best: Schedule, saved: str
    ) -> Iterator[None]:
        """Compares both schedules by the clock, in turns, and settles."""
        _apply(parameters, best)
        for _ in range(2):  # the first one compiles
            yield
        took: dict[Schedule, list[float]] = {first: [], best: []}
        for number in range(2 * self._turns):
            now = best if number % 4 in (0, 3) else first
            _apply(parameters, None if now is first else now)  # whose graphs are there
            start = self._clock()
            yield
            took[now].append(self._clock() - start)
        mine = [statistics.median(took[each]) for each in (first, best)]
        told = all_gather_json(_CALL, mine, self._group)
        before, after = (max(each) for each in zip(*told, strict=True))
        text = (
            f"{before * 1e3:,.1f} ms with {_told(first)}, {after * 1e3:,.1f} ms with {_told(best)} "
            f"({after / before - 1:+.1%}, predicted -{saved})"
        )
        if after < before * (1 - _WORTH):
            self._settle(best, text, saves=best)
        else:
            self._settle(None, f"{_STAY}: {text}", saves=first)

    def _clock(self) -> float:
        if self._mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _settle(
        self, schedule: Schedule | None, reason: str, saves: Schedule | None = None
    ) -> None:
        _apply(self._parameters, schedule)
        _unsettled.discard(self)
        self.schedule, self.reason, self.is_settled = schedule, reason, True
        if saves is not None and self._file is not None and self._group.rank() == 0:
            self._save(self._file, saves)
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

    def _save(self, file: Path, schedule: Schedule) -> None:
        saved = {"version": _VERSION, "model": self._key(), "options": schedule._asdict()}
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
        if not all(each.handle.can.sends_messages for each in self._parameters):
            self._settle(None, f"{_STAY}: ranks share memory, where gathers move nothing")
            return
        saved = all_gather_json(_CALL, on_all_ranks(_CALL, self._read, self._group), self._group)
        if saved[0] is not None:
            schedule, reason = saved[0]
            reason = reason.replace(_STAY, "the options of the run that measured", 1)
            self._settle(Schedule(*schedule), f"taken from {self._file}: {reason}")

    def _read(self) -> Any:
        """Returns the saved schedule and its reason, or None if there is no choice yet."""
        mine = set(self._parameters)
        if any(not mine.isdisjoint(other._parameters) for other in _unsettled):
            raise Zero3Error(
                "MeasuredSchedule: another one of this model, or of a part of it, is not settled"
            )
        file = self._file
        if file is None or self._group.rank() > 0:
            return None
        if file.exists():
            try:
                saved = json.loads(file.read_text())
                if (saved["version"], saved["model"]) == (_VERSION, self._key()):
                    options = Options().with_schedule(Schedule(**saved["options"]))
                    return options.schedule, str(saved["reason"])
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise Zero3Error(
                    f"MeasuredSchedule: {file} is not one of its files ({line_of(error)}): "
                    "remove it"
                ) from error
            warnings.warn(
                f"MeasuredSchedule: {file} is of another model, number of ranks or version: steps "
                "are measured anew, and it is replaced",
                stacklevel=5,
            )
        if not os.access(file.parent, os.W_OK):  # where the choice will be saved
            raise Zero3Error(f"MeasuredSchedule: {file.parent} is no folder that can be written to")
        return None


def _told(schedule: Schedule) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in schedule._asdict().items())


def _apply(parameters: Iterable[ShardedParameter], schedule: Schedule | None) -> None:
    for parameter in parameters:
        parameter.schedule = schedule
        parameter.update_facts()
