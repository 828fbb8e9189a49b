"""Command line of ``python -m deepcompile_zero3``."""

import argparse
import functools
import sys
from collections.abc import Sequence

from deepcompile_zero3.tools import digest, doctor, passes
from deepcompile_zero3.tools.arguments import run_plainly
from deepcompile_zero3.tools.planning import commands as planning
from deepcompile_zero3.tools.tracing import trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, by default the one in ``sys.argv``, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m deepcompile_zero3", description="ZeRO-3 as a compiler pass."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = commands.add_parser("doctor", help="what is installed, and whether two ranks work")
    command.set_defaults(run=lambda _: doctor.main())
    planning.add_to(commands)
    command = commands.add_parser("trace", help="what a step of a training script really does")
    trace.add_arguments(command)
    command.set_defaults(run=trace.main)
    command = commands.add_parser("passes", help="the passes over graphs, and what each changes")
    passes.add_arguments(command)
    command.set_defaults(run=functools.partial(run_plainly, passes.main))
    command = commands.add_parser("digest", help="the first step at which two runs differ")
    digest.add_arguments(command)
    command.set_defaults(run=digest.main)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
