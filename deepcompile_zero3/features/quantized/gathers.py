"""Chooses how the shards of parameters are quantized before they are gathered."""

import math
import weakref
from collections.abc import Collection, Sequence
from typing import cast

from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.extensions.extension import Payload
from deepcompile_zero3.features.quantized.format import can_be_quantized, check_dtype, format_of
from deepcompile_zero3.options import Options
from deepcompile_zero3.sharding.parameter import ShardedParameter


def gather_format(parameter: ShardedParameter, options: Options) -> str:
    """Returns the format in which ``options`` ask for ``parameter`` to be gathered.

    Raises:
        ValueError: the function ``gather_dtype`` returns a dtype that codes cannot have.
        Zero3Error: ``gather_block`` does not divide a row of the parameter.
    """
    dtype = options.gather_dtype
    if dtype is None:
        return ""
    name, shard = parameter.fqn, cast(nn.Parameter, parameter.shard)
    if not can_be_quantized(shard) or isinstance(parameter, Payload) or parameter.extension:
        return ""
    if callable(dtype):
        dtype = dtype(name, shard)
        if dtype is not None:
            check_dtype(f"gather_dtype of '{name}'", dtype)
    if dtype is None:
        return ""
    row = math.prod(parameter.handle.sizes[1:])
    what = "option 'gather_block'"
    return format_of(dtype, options.gather_block, what, name, shard.shape, row)


class Formats:
    """The formats of the parameters that a graph was compiled with."""

    def __init__(
        self, parameters: Collection[ShardedParameter], formats: Sequence[str], options: Options
    ) -> None:
        self._options = options
        self._traced = formats
        self._known = weakref.WeakSet(parameters)

    def check(self, parameters: Sequence[ShardedParameter]) -> None:
        """Raises Zero3Error if the function ``gather_dtype`` tells twins of modules apart."""
        if not callable(self._options.gather_dtype):
            return
        for parameter, traced in zip(parameters, self._traced, strict=True):
            if parameter in self._known:
                continue
            self._known.add(parameter)
            asked = gather_format(parameter, self._options)
            if asked != traced:
                raise Zero3Error(
                    f"gather_dtype says {asked or None} of '{parameter.fqn}', and {traced or None} "
                    "of the parameter in whose place a compiled graph takes it: equal modules that "
                    "are compiled one by one share a graph. Compile the model as a whole"
                )
