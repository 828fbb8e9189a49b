"""``python -m deepcompile_zero3 passes``: lists the passes, and shows what one does to a graph."""

import argparse
import inspect

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.graph.capture import CapturedPass, capture_graphs
from deepcompile_zero3.graph_inputs import passes_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.graph_pass import MAY_CHANGE, GraphPass, check_passes, names_of
from deepcompile_zero3.passes.verify.invariants import INVARIANTS
from deepcompile_zero3.tools.arguments import load
from deepcompile_zero3.tools.planning.graphs import fake_model, trace

_GRAPHS = {"lowered": "a backward graph that Inductor compiles"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="PASS",
        help="shows what this pass, or FILE.py:NAME of yours, changes in a small model's graphs",
    )


def main(arguments: argparse.Namespace) -> int:
    """Prints a list of all passes and invariants, or the changes of one pass."""
    if arguments.name is None:
        _print_list()
        return 0
    found = [each for each in changes_of(arguments.name) if each.diff]
    for each in found:
        print(f"{each.name}, {each.direction}:\n{each.diff}\n")
    if not found:
        print(f"{arguments.name} changes nothing in the graphs of this model")
    return 0


def changes_of(name: str) -> list[CapturedPass]:
    """Returns the runs of a pass over the graphs of three small layers on two ranks.

    Args:
        name: a pass of this library, or ``file.py:name`` of a ``GraphPass`` or a class of such.

    Raises:
        Zero3Error: there is no such pass.
        ValueError: the pass cannot stand among those of this library.
    """
    passes = [_load(name)] if ":" in name else []
    check_passes(passes, passes_of())
    name = passes[0].name if passes else name
    known = dict.fromkeys(each for names in names_of(passes_of()).values() for each in names)
    if not passes and name not in known:
        what = "name a pass in it" if name.endswith(".py") else f"there are {', '.join(known)}"
        raise Zero3Error(f"no pass '{name}': {what}, or FILE.py:NAME")
    call = {"input": torch.ones(2, 8)}
    with fake_model(_layers, call, 2, 1, None) as model:
        traced = trace(model, call)
        options = Options(gather_bucket_mb=2**-11, keep_mb=2**-11, passes=passes)
        with capture_graphs(passes=True) as graphs:
            traced.rewrite(options, shows_passes=True)
    return [each for each in graphs.passes or () if each.name == name]


def _layers() -> nn.Module:
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)]
    return nn.Sequential(*layers)


def _load(name: str) -> GraphPass:
    path, _, attribute = name.rpartition(":")
    found = load(path, attribute, f"'{name}' is not FILE.py:NAME of a pass")
    if isinstance(found, type) and issubclass(found, GraphPass):
        try:
            found = found()
        except TypeError as error:
            raise Zero3Error(f"'{name}': {error}; name an instance instead") from error
    if not isinstance(found, GraphPass):
        raise Zero3Error(f"'{name}' is a {type(found).__name__}, and not a GraphPass")
    return found


def _print_list() -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for direction, passes in passes_of().items():
        graph = _GRAPHS.get(direction, f"the {direction} graph")
        table.add_row(f"passes over {graph}", "")
        for each in passes:
            text = inspect.getdoc(each) or ""
            table.add_row(f"  {each.name}", escape(text.splitlines()[0].replace("``", "")))
    table.add_row("invariants", "* a pass of yours may say that it changes this one")
    for name, (promise, _) in INVARIANTS.items():
        table.add_row(f"{'*' if name in MAY_CHANGE else ' '} {name}", escape(promise))
    Console(emoji=False).print(table, highlight=False)
