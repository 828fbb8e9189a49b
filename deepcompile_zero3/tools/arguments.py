"""Arguments that several commands have, and how they load files and print errors."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any
from warnings import catch_warnings, filterwarnings

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.torch_internals import dynamo_runs

_TOLD = (Zero3Error, ImportError, OSError, ValueError, NotImplementedError)


def add_outputs(parser: argparse.ArgumentParser, page: bool = True) -> None:
    """Adds ``--json`` and, if there is a page, ``--save``: the files of :meth:`Document.show`."""
    if page:
        parser.add_argument("--save", type=_new_page, metavar="PAGE.html", help="writes a page")
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


def rate(text: str) -> float:
    """Returns the bytes/s of a link's rate as tc has it, such as "1gbit" or "250mbit"."""
    for unit, bits in {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}.items():
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdecimal() and float(number) > 0:
            return float(number) * bits / 8
    raise argparse.ArgumentTypeError(f"a rate such as 1gbit or 250mbit, got {text!r}")


def new_file(text: str) -> Path:
    """Returns the absolute path of a file in a folder that exists."""
    path = Path(text).absolute()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file in it")
    return path


def _new_page(text: str) -> Path:
    if importlib.util.find_spec("plotly") is None:
        message = 'a page needs plotly: pip install "deepcompile_zero3[report]"'
        raise argparse.ArgumentTypeError(message)
    return new_file(text)


def _number(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        message = f"NAME=NUMBER without a unit, as in memory=80e9; got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def load(path: str, name: str, otherwise: str) -> Any:
    """Returns what a Python file has under ``name``.

    Raises:
        Zero3Error: the file has no such name; or it is no Python file, and the message is
            ``otherwise``.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if not path or spec is None or spec.loader is None:
        raise Zero3Error(otherwise)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as in `python FILE.py`
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise Zero3Error(f"{path} has no '{name}'")
    return getattr(module, name)


def run_plainly(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Runs a command. Errors of this library are a line, also of its backend; those of the user's
    code are raised.
    """
    try:
        with catch_warnings():
            filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
            return run(arguments)
    except (dynamo_runs.BackendCompilerFailed, *_TOLD) as raised:
        error = dynamo_runs.raised_in_backend(raised)
        if not isinstance(error, _TOLD):
            raise
        raised_in = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
        is_ours = isinstance(error, Zero3Error | OSError)
        if not (is_ours or Path(raised_in[-1]).is_relative_to(Path(__file__).parents[1])):
            raise
        print(f"python -m deepcompile_zero3: {error}", file=sys.stderr)
        return 1
