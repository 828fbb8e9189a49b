"""Chooses how the shards of parameters are quantised before they are gathered.

A *format* is text, such as ``float8_e4m3fn/128``: the dtype of the codes, and the number of
elements in a block, which share a scale. Blocks lie within a row of the runtime, so that the
rounded values do not depend on the number of ranks. Empty text stands for no quantisation.
"""

import math
from typing import cast

from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.options import Options, check_gather_dtype
from deepcompile_zero3.sharding.parameter import ShardedParameter

_BLOCK = 128


def gather_format(parameter: ShardedParameter, options: Options) -> str:
    """Returns the format in which ``options`` ask for ``parameter`` to be gathered.

    Raises:
        ValueError: the function ``gather_dtype`` returns a dtype that codes cannot have.
        Zero3Error: ``gather_block`` does not divide a row of the parameter.
    """
    dtype = options.gather_dtype
    name, shard = parameter.fqn, cast(nn.Parameter, parameter.shard)
    if shard.ndim < 2 or not shard.is_floating_point() or shard.numel() == 0:
        return ""
    if callable(dtype):
        dtype = dtype(name, shard)
        if dtype is not None:
            check_gather_dtype(f"gather_dtype of '{name}'", dtype)
    if dtype is None:
        return ""
    row = math.prod(parameter.placeholder.shape[1:])
    block = options.gather_block or (_BLOCK if row % _BLOCK == 0 else row)
    if row % block:
        raise Zero3Error(
            f"option 'gather_block' is {block}, which does not divide a row of '{name}' "
            f"{list(shard.shape)}, {row} elements: choose a divisor of {row}, leave gather_block "
            "out, or give a function as gather_dtype that returns None for this parameter"
        )
    return f"{str(dtype).removeprefix('torch.')}/{block}"
