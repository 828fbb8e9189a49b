"""Chooses how the shards of parameters are quantized before they are gathered."""

import math
import weakref
from collections.abc import Collection, Sequence
from typing import cast

from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.quantized.format import can_be_quantized, check_dtype, format_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.sharding.source import Source


def gather_format(source: Source, options: Options) -> str:
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


class Formats:
    """The formats of the parameters that a graph was compiled with."""

    def __init__(
        self, sources: Collection[Source], formats: Sequence[str], options: Options
    ) -> None:
        self._options = options
        self._traced = formats
        self._known = weakref.WeakSet(sources)

    def check(self, sources: Sequence[Source]) -> None:
        """Raises Zero3Error if the function ``gather_dtype`` tells twins of modules apart."""
        if not callable(self._options.gather_dtype):
            return
        for source, traced in zip(sources, self._traced, strict=True):
            if source in self._known:
                continue
            self._known.add(source)
            asked = gather_format(source, self._options)
            if asked != traced:
                raise Zero3Error(
                    f"gather_dtype says {asked or None} of '{source.fqn}', and {traced or None} "
                    "of the parameter in whose place a compiled graph takes it: equal modules that "
                    "are compiled one by one share a graph. Compile the model as a whole"
                )
