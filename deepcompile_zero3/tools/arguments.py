"""Arguments that several commands have."""

import argparse
from pathlib import Path


def add_outputs(parser: argparse.ArgumentParser, page: bool = True) -> None:
    """Adds ``--json`` and, if there is a page, ``--save``: the files of :meth:`Document.show`."""
    if page:
        parser.add_argument("--save", type=new_file, metavar="PAGE.html", help="writes a page")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="writes the numbers")


def add_numbers(parser: argparse.ArgumentParser) -> None:
    """Adds ``--set``, for ``Machine.with_numbers(**dict(arguments.set))``."""
    parser.add_argument(
        "--set",
        type=_number,
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="of the machine: flops, bandwidth, remote_bandwidth, ranks_per_host...",
    )


def positive(text: str) -> int:
    """Returns an integer above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a positive number, got {text!r}")
    return int(text)


def new_file(text: str) -> Path:
    """Returns the absolute path of a file in a folder that exists."""
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def _number(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        message = f"NAME=NUMBER without a unit, as in memory=80e9; got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
