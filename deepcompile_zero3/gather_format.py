"""Chooses how the shards of parameters are quantised before they are gathered."""

import math
from typing import cast

from torch import nn

from deepcompile_zero3.options import Options
from deepcompile_zero3.quantized_format import can_be_quantised, check_dtype, format_of
from deepcompile_zero3.sharding.parameter import ShardedParameter


def gather_format(parameter: ShardedParameter, options: Options) -> str:
    """Returns the format in which ``options`` ask for ``parameter`` to be gathered.

    Raises:
        ValueError: the function ``gather_dtype`` returns a dtype that codes cannot have.
        Zero3Error: ``gather_block`` does not divide a row of the parameter.
    """
    dtype = options.gather_dtype
    name, shard = parameter.fqn, cast(nn.Parameter, parameter.shard)
    if not can_be_quantised(shard):
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
