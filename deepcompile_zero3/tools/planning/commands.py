"""The commands ``plan``, ``explain`` and ``compile``."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any
from warnings import catch_warnings, filterwarnings

from rich.console import Console

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.tools.planning import job, sweep
from deepcompile_zero3.tools.planning.ahead import CompiledAhead
from deepcompile_zero3.tools.planning.predicted import Plan
from deepcompile_zero3.tools.report import Report, text_of


def add_to(commands: Any) -> None:
    """Adds the commands to a parser's subparsers."""
    for name, run, about in (
        ("plan", _plan, "time and memory of a step on ranks that need not be there"),
        ("explain", _explain, "what the graphs of that step gather, keep and reduce"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=_told_in_a_line(run))
        job.add_model(command)
        job.add_machine(command)
        command.add_argument("--save", type=Path, metavar="PAGE.html", help="writes a page")
        command.add_argument("--json", type=Path, metavar="FILE", help="writes the numbers")
        if name == "plan":
            command.add_argument(
                "--sweep",
                type=_sweep,
                metavar="NAME=A,B,...",
                help=f"a table of plans, one of {', '.join(_KNOBS)} changed",
            )
            command.add_argument("--picture", type=Path, metavar="FILE", help="of the sweep")
    about = "compiles the graphs of that step and stores them for ranks that will run it"
    command = commands.add_parser("compile", help=about, description=about)
    command.set_defaults(run=_told_in_a_line(_compile))
    job.add_model(command)
    command.add_argument("--json", type=Path, metavar="FILE", help="writes the numbers")


Command = Callable[[argparse.Namespace], int]


def _told_in_a_line(run: Command) -> Command:
    """Prints errors of this library in a line; errors of the user's code keep their traceback."""

    def command(arguments: argparse.Namespace) -> int:
        try:
            _check_folders(arguments)
            with catch_warnings():
                filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
                return run(arguments)
        except (Zero3Error, ImportError, OSError, ValueError) as error:
            raised_in = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
            is_ours = isinstance(error, Zero3Error | OSError)
            if not (is_ours or Path(raised_in[-1]).is_relative_to(Path(__file__).parents[2])):
                raise
            print(f"python -m deepcompile_zero3: {error}", file=sys.stderr)
            return 1

    return command


def _check_folders(arguments: argparse.Namespace) -> None:
    for name in ("save", "json", "picture"):
        path = getattr(arguments, name, None)
        if path is not None and not path.absolute().parent.is_dir():
            raise Zero3Error(f"--{name}: there is no folder {path.parent}")


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.sweep:
        return _plans(arguments)
    if arguments.picture:
        raise ValueError("--picture is that of a --sweep")
    return _show(_planned(arguments), arguments)


def _plans(arguments: argparse.Namespace) -> int:
    if arguments.save:
        raise ValueError(
            "--save writes the page of one plan: leave --sweep away, or take --picture"
        )
    knob, values = arguments.sweep
    plans = {value: _planned(arguments, advise=False, **{knob: value}) for value in values}
    first = next(iter(plans.values()))
    title = f"{first.report.model} on {first.machine.name}"
    print(text_of((sweep.table(knob, plans), "", first.machine.provenance)))
    if arguments.picture:
        sweep.draw(title, knob, plans, arguments.picture)
    if arguments.json:
        found = [{knob: value} | plan.to_dict() for value, plan in plans.items()]
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    return _show(_planned(arguments, advise=False).report, arguments)


def _compile(arguments: argparse.Namespace) -> int:
    with Console(stderr=True).status("compiling"):
        compiled = job.compiled(arguments)
    _print(compiled, arguments)
    return 0 if all(graph.is_stored for graph in compiled.graphs) else 1


def _planned(arguments: argparse.Namespace, **changes: Any) -> Plan:
    """Returns a plan and shows its progress on a terminal."""
    changed = "".join(f"{name}={value}: " for name, value in changes.items() if name in _KNOBS)
    with Console(stderr=True).status("") as status:
        return job.plan_of(arguments, lambda phase: status.update(changed + phase), **changes)


def _show(found: Plan | Report, arguments: argparse.Namespace) -> int:
    _print(found, arguments)
    if arguments.save:
        found.save(arguments.save)
    return 0


def _print(found: Plan | Report | CompiledAhead, arguments: argparse.Namespace) -> None:
    print(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found.to_dict(), indent=1))


_KNOBS = {
    "ranks": int,
    "batch": int,
    "sequence": int,
    "keep_mb": float,
    "gather_bucket_mb": float,
}


def _sweep(text: str) -> tuple[str, list[float]]:
    knob, _, values = text.partition("=")
    if knob not in _KNOBS:
        raise argparse.ArgumentTypeError(f"one of {', '.join(_KNOBS)}, got {knob!r}")
    try:
        return knob, [_KNOBS[knob](value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"NAME=A,B,... of numbers, got {text!r}") from None
