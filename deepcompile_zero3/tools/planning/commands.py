"""The commands ``plan``, ``explain`` and ``compile``."""

import argparse
import functools
import json
from dataclasses import replace
from typing import Any

from deepcompile_zero3.tools.arguments import (
    add_numbers,
    add_outputs,
    rate,
    run_plainly,
)
from deepcompile_zero3.tools.document import text_of
from deepcompile_zero3.tools.planning import job, sweep
from deepcompile_zero3.tools.planning.ahead import compile_ahead
from deepcompile_zero3.tools.planning.machine import MACHINES, Machine
from deepcompile_zero3.tools.planning.plan import plan
from deepcompile_zero3.tools.planning.predicted import Plan
from deepcompile_zero3.tools.progress import progress


def add_to(commands: Any) -> None:
    """Adds the commands to a parser's subparsers."""
    for name, run, about in (
        ("plan", _plan, "time and memory of a step on ranks that need not be there"),
        ("explain", _explain, "what the graphs of that step gather, keep and reduce"),
        ("compile", _compile, "compiles the graphs of that step and stores them for ranks on CPUs"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=functools.partial(run_plainly, run))
        job.add_arguments(command)
        add_outputs(command, page=name != "compile")
        add = command.add_argument
        if name != "compile":
            add("--activations-mb", type=float, help="the option activations_mb of the backend")
            add("--machine", default="h100", choices=MACHINES, help="(default: h100)")
            add_numbers(command)
            within = "rate of a rank's link within its host, such as 400gbit"
            add("--link", type=rate, metavar="RATE", help=within)
            between = "rate of a host's link to other hosts, such as 1gbit; its ranks share it"
            add("--host-link", type=rate, metavar="RATE", help=between)
            rows = "c10d's, whose ranks get rows of other hosts once a host, or over gloo once each"
            add("--backend", choices=("nccl", "gloo"), help=f"{rows} (default: the machine's)")
            state = "state of each element (default: 8, AdamW in fp32)"
            add("--optimizer-bytes", type=int, default=8, help=state)
            add("--no-prefetch", action="store_true", help="gathers start when they are waited for")
        if name == "plan":
            knobs = f"a table of plans, one of {', '.join(sweep.KNOBS)} changed"
            add("--sweep", type=sweep.parse, metavar="NAME=A,B,...", help=knobs)
            add("--picture", type=sweep.picture, metavar="FILE", help="of the sweep")


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.sweep:
        return _sweep(arguments, *arguments.sweep)
    if arguments.picture:
        raise ValueError("--picture is that of a --sweep")
    _planned(arguments).show(arguments.save, arguments.json)
    return 0


def _sweep(arguments: argparse.Namespace, knob: str, values: list[sweep.Value]) -> int:
    if arguments.save:
        raise ValueError(
            "--save writes the page of one plan: leave --sweep away, or take --picture"
        )
    machine = _machine(arguments)
    asked = {v: sweep.arguments_of(knob, v, arguments.ranks, machine) for v in values}
    for changes in asked.values():
        job.check(argparse.Namespace(**vars(arguments) | changes))
    plans = {v: _planned(arguments, advise=False, **changes) for v, changes in asked.items()}
    first = next(iter(plans.values()))
    told = ("", sweep.verdict(plans)) if knob == "layout" else ()
    print(text_of((sweep.table(knob, plans), *told, "", first.machine.provenance)))
    if arguments.json:
        found = [{knob: value} | plan.to_dict() for value, plan in plans.items()]
        arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.picture:
        title = f"{first.report.model} on {first.machine.name}"
        sweep.draw(title, knob, plans, arguments.picture)
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    _planned(arguments, advise=False).report.show(arguments.save, arguments.json)
    return 0


def _compile(arguments: argparse.Namespace) -> int:
    with progress() as tell:
        tell("reading the model")
        compiled = compile_ahead(**job.job_of(arguments), tell=tell)
    compiled.show(data=arguments.json)
    return 0 if all(graph.is_stored for graph in compiled.graphs) else 1


def _machine(arguments: argparse.Namespace) -> Machine:
    machine = MACHINES[arguments.machine].with_numbers(**dict(arguments.set))
    links = {}
    if arguments.link:
        links["local_bandwidth"] = arguments.link
    if arguments.host_link:
        ranks = min(machine.ranks_per_host, arguments.ranks)
        links["remote_bandwidth"] = arguments.host_link / ranks
    machine = machine.with_numbers(**links)
    return replace(machine, backend=arguments.backend or machine.backend)


def _planned(arguments: argparse.Namespace, advise: bool = True, **changes: Any) -> Plan:
    """Returns the plan for ``arguments`` with ``changes``, and says what it does meanwhile."""
    asked = argparse.Namespace(**vars(arguments) | changes)
    changed = "".join(f"{name}={value}: " for name, value in changes.items())
    with progress() as tell:
        tell(f"{changed}reading the model")
        return plan(
            **job.job_of(asked),
            machine=_machine(asked),
            optimizer_bytes=asked.optimizer_bytes,
            prefetch=not asked.no_prefetch,
            advise=advise,
            tell=lambda phase: tell(changed + phase),
        )
