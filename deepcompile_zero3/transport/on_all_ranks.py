"""Calls what each rank does by itself, and lets all ranks raise if one of them has raised."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.transport.json_collectives import all_gather_json

_Result = TypeVar("_Result")


class ErrorOnARank(Zero3Error):
    """An error of one rank, of which all ranks know."""


def on_all_ranks(
    what: str, function: Callable[[], _Result], group: dist.ProcessGroup | None = None
) -> _Result:
    """Returns the result of ``function``; raises on all ranks if it raises on one. Collective.

    Args:
        what: name of the collective call, for messages.
        function: what each rank does by itself.
        group: process group of the ranks; None means all ranks of the job, if there are any.

    Raises:
        ErrorOnARank: ``function`` raised on a rank. The message is the first line of its error.
    """
    result, error = None, ""
    try:
        result = function()
    except Exception as raised:
        error = line_of(raised)
    group = group or dist.group.WORLD
    errors = [error] if group is None else all_gather_json(what, error, group)
    for each in filter(None, errors):
        raise ErrorOnARank(each)
    return result  # type: ignore[return-value]


def line_of(error: BaseException) -> str:
    """Returns the first line of an error, with its type unless this library raised it."""
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, Zero3Error) else f"{type(error).__name__}: {first}"
