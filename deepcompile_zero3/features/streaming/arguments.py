"""Checks of arguments, and steps that all ranks take or none."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.transport.on_all_ranks import line_of, on_all_ranks
from deepcompile_zero3.transport.rank_names import rank_names

_Result = TypeVar("_Result")


def check_megabytes(name: str, mb: float) -> float:
    """Returns ``mb`` MiB in bytes. Raises ValueError unless it is a positive, finite number."""
    if not isinstance(mb, int | float) or isinstance(mb, bool) or not 0 < mb < math.inf:
        raise ValueError(f"{name} is a positive number of MiB, got {mb!r}")
    return mb * 2**20


def check_dtype_argument(dtype: torch.dtype | None) -> None:
    """Raises TypeError unless ``dtype`` is None or a floating dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype is a floating torch.dtype or None, got {dtype!r}")


def group_of_ranks(what: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns ``group``, or that of all ranks. Raises Zero3Error if there is none."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise Zero3Error(f"{what} needs a job: call torch.distributed.init_process_group first")
    return group


def on_each_rank(what: str, function: Callable[[], _Result], group: dist.ProcessGroup) -> _Result:
    """Calls :func:`on_all_ranks`, so that an error names the rank that raised first. Collective."""

    def step() -> _Result:
        try:
            return function()
        except Exception as error:
            name = rank_names(group)[dist.get_rank(group)]
            raise Zero3Error(f"{what}, rank {name}: {line_of(error)}") from error

    return on_all_ranks(what, step, group)
