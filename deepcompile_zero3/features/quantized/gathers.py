"""Chooses how the shards of parameters are quantized before they are gathered."""

import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import cast

from torch import nn

from deepcompile_zero3.codec import check_dtype
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.quantized.formats import can_be_quantized, format_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.sharding.source import Source


def format_of_gather(source: Source, options: Options) -> str:
    """Returns the format in which ``options`` ask for ``source`` to be gathered.

    Raises:
        ValueError: the function ``gather_dtype`` returns a dtype that codes cannot have.
        Zero3Error: ``gather_block`` does not divide a row of the parameter.
    """
    dtype = options.gather_dtype
    if dtype is None:
        return ""
    name, shard = source.fqn, cast(nn.Parameter, source.shard)
    if not can_be_quantized(shard) or source.parameter.substitute is not None:
        return ""
    if callable(dtype):
        dtype = dtype(name, shard)
        if dtype is not None:
            check_dtype(f"gather_dtype of '{name}'", dtype)
    if dtype is None:
        return ""
    row = math.prod(source.handle.sizes[1:])
    what = "option 'gather_block'"
    return format_of(dtype, options.gather_block, what, name, shard.shape, row)


def check_of(
    sources: Collection[Source], formats: Sequence[str], options: Options
) -> Callable[[Sequence[Source]], None] | None:
    """Returns a check of the sources that a graph runs with, if ``gather_dtype`` is a function.

    Args:
        sources: those that the graph was compiled for.
        formats: their formats.
        options: the options of the graph.

    Returns:
        A function that raises Zero3Error if ``gather_dtype`` tells twins of modules apart.
    """
    if not callable(options.gather_dtype):
        return None
    known = weakref.WeakSet(sources)

    def check(others: Sequence[Source]) -> None:
        for source, traced in zip(others, formats, strict=True):
            if source in known:
                continue
            known.add(source)
            asked = format_of_gather(source, options)
            if asked != traced:
                raise Zero3Error(
                    f"gather_dtype says {asked or None} of '{source.fqn}', and {traced or None} "
                    "of the parameter in whose place a compiled graph takes it: equal modules that "
                    "are compiled one by one share a graph. Compile the model as a whole"
                )

    return check
