"""What the parts of ``python -m bench`` share: arguments, and how results are printed."""

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from rich.console import Console

from bench.workloads import WORKLOADS

console = Console(stderr=True, emoji=False)

MOST_WORKLOADS = [name for name in WORKLOADS if name != "tiny" and "depth" not in name]


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns the type of an argument: names among ``known``, with commas between them."""

    def parse(text: str) -> list[str]:
        if unknown := sorted(set(given := text.split(",")) - set(known)):
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)} is not among {', '.join(known)}"
            )
        return given

    return parse


def add_workloads(part: argparse.ArgumentParser, default: Sequence[str] = MOST_WORKLOADS) -> None:
    """Adds ``--workloads``."""
    without = "all but tiny (which takes a minute) and depth-N"
    part.add_argument(
        "-w",
        "--workloads",
        type=names(WORKLOADS),
        default=list(default),
        metavar="A,B,...",
        help=f"{without if default is MOST_WORKLOADS else ','.join(default)} without this",
    )


def add_ranks(part: argparse.ArgumentParser) -> None:
    """Adds ``--ranks``."""
    part.add_argument("--ranks", type=int, default=2, help="processes of each mode")


def print_table(lines: Iterable[str], *settings: str) -> None:
    """Prints a table below the command, the machine, ``settings`` and the time."""
    print(f"`{command()}`, {machine(*settings)}, {now()}\n")
    print("\n".join(lines))


def command() -> str:
    """Returns the command that runs."""
    return shlex.join(["python", "-m", "bench", *sys.argv[1:]])


def machine(*settings: str) -> str:
    """Returns what the numbers depend on: processor, ``settings`` and versions."""
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    versions = f"torch {torch.__version__}", f"Python {platform.python_version()}"
    return ", ".join((cores, *settings, *versions))


def now() -> str:
    """Returns the time in minutes."""
    return time.strftime("%Y-%m-%d %H:%M")
