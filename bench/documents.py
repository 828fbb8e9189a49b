"""Measures the tables of the documentation again, and writes them where they stand.

A table of this kind is what a part of ``python -m bench`` has printed::

    `python -m bench -w B -m floor,zero3`, 2 cores (x86_64), 2 ranks, ..., 2026-11-22 19:48

    | mode | min | ...

Commands that print several tables, and stand before each of them, run once.
"""

import argparse
import re
import shlex
import subprocess
import sys
from itertools import count
from pathlib import Path

from bench.command_line import console

_DOCS = Path("docs")
_TABLE = re.compile(
    r"^`(?P<command>python -m bench[^`]*)`, \d+ cores [^\n]*\n\n(?:\|[^\n]*\n)+", re.MULTILINE
)


def add_arguments(part: argparse.ArgumentParser) -> None:
    """Adds the arguments of :func:`run`."""
    part.add_argument(
        "pages", type=Path, nargs="*", default=sorted(_DOCS.glob("*.md")), help="all of docs"
    )
    part.add_argument("--match", default="", help="only commands that contain this, such as '-w B'")
    part.add_argument("--list", action="store_true", help="only list the commands")


def run(args: argparse.Namespace) -> None:
    """Measures the tables of the documentation again, and writes them where they stand."""
    for page in args.pages:
        commands = dict.fromkeys(each["command"] for each in _TABLE.finditer(page.read_text()))
        for command in commands:
            if args.match not in command:
                continue
            console.print(f"{page}: {command}", soft_wrap=True, markup=False, highlight=False)
            if not args.list:
                write(page, command, _output(command))


def write(page: Path, command: str, output: str) -> None:
    """Writes the tables of ``command`` in ``page`` anew, in the order of those in ``output``.

    Raises:
        SystemExit: the page has another number of them.
    """
    found = [each for each in _TABLE.finditer(output) if each["command"] == command]
    numbers = count()

    def replace(old: re.Match[str]) -> str:
        if old["command"] != command:
            return old[0]
        number = next(numbers)
        return found[number][0] if number < len(found) else old[0]

    text = _TABLE.sub(replace, page.read_text())
    if (standing := next(numbers)) != len(found):
        raise SystemExit(f"{page} has {standing} tables of `{command}`, which printed {len(found)}")
    page.write_text(text)


def _output(command: str) -> str:
    """Returns what ``command`` prints to its standard output."""
    _python, *arguments = shlex.split(command)
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"`{command}` failed with status {done.returncode}")
    return done.stdout
