"""Prints earlier results."""

import argparse
import json
from pathlib import Path

from bench import steps


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    part.add_argument("files", type=Path, nargs="+")


def run(args: argparse.Namespace) -> None:
    """Prints results from files."""
    for path in args.files:
        steps.print_results(json.loads(path.read_text()))
