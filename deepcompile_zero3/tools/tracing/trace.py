"""``python -m deepcompile_zero3 trace script.py``: measures a step of a training script."""

import argparse
import contextlib
import json
import os
import runpy
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from deepcompile_zero3.features.optimizer_steps.step_layers import has_more_parts
from deepcompile_zero3.graph.capture import CapturedGraphs, capture_graphs
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.tools.arguments import add_numbers, add_outputs, positive
from deepcompile_zero3.tools.planning.machine import MACHINES
from deepcompile_zero3.tools.tracing.measurement import Measurement
from deepcompile_zero3.tools.tracing.prediction import Prediction, predict
from deepcompile_zero3.tools.tracing.profile import Event, events_of, steps_of, timeline_of
from deepcompile_zero3.torch_internals import compiler

_HERE = "here"
_COMPILES = "(dynamo_timed)"  # suffix of the ranges of torch's compiler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add = parser.add_argument
    add("--skip", type=positive, default=2, help="steps before, which compile (default: 2)")
    add("--steps", type=positive, default=3, help="steps that are profiled (default: 3)")
    add_outputs(parser)
    add(
        "--machine",
        choices=[*MACHINES, _HERE],
        help="predicts the step for it too; here: measures the one at hand, a minute or so",
    )
    add_numbers(parser)
    add(
        "script",
        help="a training script, which is run as by: python script args... What stands before "
        "it is for trace, what stands after it for the script. One that torchrun starts is traced "
        "so: torchrun --nproc-per-node 2 -m deepcompile_zero3 trace script.py",
    )
    add("arguments", nargs=argparse.REMAINDER, metavar="args", help="of the script")


def main(args: argparse.Namespace) -> int:
    """Runs the script, reports its median profiled step, and returns the exit status.

    Exceptions of the script are passed on.
    """
    if wrong := _wrong_in(args):
        return _fail(wrong, status=2)
    machine = MACHINES.get(args.machine)
    trouble: list[Exception] = []
    steps = Steps()

    def show(profile: torch.profiler.profile) -> None:
        if _rank() != 0 and args.machine != _HERE:
            return
        predicted, profiled = Prediction(), None
        try:  # an error must not stop the script, whose other ranks would wait
            events = _events_of(profile)
            ordered = sorted(steps_of(events), key=lambda step: step.seconds)
            profiled = events, ordered[(len(ordered) - 1) // 2]  # the median
        except Exception as error:
            trouble.append(error)
        if args.machine:
            predicted = predict(graphs, machine, dict(args.set), profiled, list(steps.optimizers))
        if profiled is None or _rank() != 0:
            return
        try:
            _measurement(*profiled, args.script, predicted).show(args.save, args.json)
        except Exception as error:
            trouble.append(error)

    exited = None
    with (
        compiler.with_named_kernels(),
        capture_graphs() if args.machine else contextlib.nullcontext(CapturedGraphs()) as graphs,
        _profiled(steps, args.skip, args.steps, show),
    ):
        try:
            _run(args.script, args.arguments)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            exited = error
    if steps.ended < args.skip + args.steps:
        return _fail(_too_short(steps.ended, args), status=1)
    if trouble:
        return _fail(f"the profile could not be told: {trouble[0]!r}", status=1)
    if exited is not None:
        raise exited
    return 0


def _wrong_in(args: argparse.Namespace) -> str:
    """Returns the error in the arguments, if any, before the script is run."""
    if not os.path.isfile(args.script):
        return f"there is no file {args.script}"
    if args.set and not args.machine:
        return "--set is of a --machine"
    try:
        MACHINES.get(args.machine, MACHINES["h100"]).with_numbers(**dict(args.set))
    except ValueError as error:
        return f"--set: {error}"
    return ""


class Steps:
    """Counts a script's training steps by the steps of its optimizers.

    A training step ends when an optimizer steps that has already stepped at or after the previous
    end, or when the first optimizer of all steps. Several optimizers of one step thus count once,
    and so do the parts of an optimizer's step. What steps in a backward is a part, too: the call of
    ``optimizer.step()`` after it counts, since torch's profiler does not survive a step there.

    Attributes:
        ended: the number of training steps that have ended.
        at_end: called at the end of each training step.
        optimizers: live optimizers that have stepped.
    """

    def __init__(self) -> None:
        self.ended = 0
        self.at_end: Callable[[], None] = lambda: None
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Notes that an optimizer has stepped."""
        if _C.in_backward() or has_more_parts(optimizer):
            return
        self.optimizers.add(optimizer)
        if not self._stepped or optimizer in self._stepped:
            self._stepped.clear()
            self.ended += 1
            self.at_end()
        self._stepped.add(optimizer)


@contextlib.contextmanager
def _profiled(
    steps: Steps, skip: int, count: int, done: Callable[[torch.profiler.profile], None]
) -> Iterator[None]:
    """Calls ``done`` when the profiled steps have ended, if they end inside the block."""

    def ready(profile: torch.profiler.profile) -> None:
        if steps.ended == skip + count:
            done(profile)

    schedule = torch.profiler.schedule(wait=skip - 1, warmup=1, active=count, repeat=1)
    profile = torch.profiler.profile(schedule=schedule, on_trace_ready=ready, profile_memory=True)

    def step() -> None:
        if steps.ended <= skip + count:
            if torch.cuda.is_initialized():  # kernels that a step launched end in it
                torch.cuda.synchronize()
            profile.step()

    steps.at_end = step
    handle = register_optimizer_step_post_hook(steps)
    try:
        with profile:
            yield
    finally:
        handle.remove()


def _run(script: str, arguments: list[str]) -> None:
    """Runs ``python script arguments...`` in this process."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    try:
        runpy.run_path(os.path.abspath(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def _events_of(profile: torch.profiler.profile) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return events_of(json.loads(path.read_text(encoding="utf-8")))


def _measurement(
    events: list[Event], step: Event, script: str, predicted: Prediction
) -> Measurement:
    inside = (event.name for event in events if step.start <= event.start < step.end)
    return Measurement(
        script=os.path.basename(script),
        rank=_rank(),
        number=int(step.name.partition("#")[2]) + 1,
        durations=tuple(each.seconds for each in steps_of(events)),
        duration=step.seconds,
        timeline=timeline_of(events, step),
        is_sharded=bool(_C.live_model_numbers()),
        compiles=any(name.endswith(_COMPILES) for name in inside),
        predicted=predicted.timeline,
        remark=predicted.remark,
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _too_short(ended: int, args: argparse.Namespace) -> str:
    text = (
        f"{args.script} took {ended} step{'' if ended == 1 else 's'} and ended, where --skip "
        f"{args.skip} and --steps {args.steps} need {args.skip + args.steps}. A step ends where "
        "an optimizer of torch.optim has stepped, outside of a backward"
    )
    if ended == 0:
        text += (
            ", in this process. If the script starts its ranks itself, start them here: torchrun "
            "--nproc_per_node 2 -m deepcompile_zero3 trace script.py"
        )
    return text


def _fail(text: str, status: int) -> int:
    if _rank() == 0:
        print(f"trace: {text}", file=sys.stderr)
    return status
