"""``quantize_replica_gathers``: what replicas gather of each other travels as codes of one byte."""

import torch
from torch import nn

from deepcompile_zero3.codec import check_block, check_dtype
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.quantized.formats import format_of_parameter
from deepcompile_zero3.sharding.module_parameters import all_parameters_of


def quantize_replica_gathers(
    model: nn.Module, dtype: torch.dtype | None, *, block: int | None = None
) -> None:
    """Makes forwards of ``model`` from now on gather quantized shards over replicas.

    For a model that is sharded with ``shard_optimizer_over_replicas=True``: after a step, the parts
    of each shard cross between replicas as codes of one byte with a scale for each block, in place
    of ``param_dtype``. All replicas compute with the same rounded values. Ranks with other shards
    gather these as they are. The parameters that the optimizer steps are not rounded. Call it on
    all ranks, between steps.

    Args:
        model: a module whose parameters are sharded, and have parts.
        dtype: dtype of the codes: ``torch.int8``, ``torch.float8_e4m3fn`` or
            ``torch.float8_e5m2``. None ends quantization.
        block: number of elements in a block, which must divide a row: the elements behind one
            index of the sharded dimension. None takes 128 where that divides a row, or else the
            whole row.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``dtype`` or ``block`` is not one of these.
        Zero3Error: no parameter of ``model`` has parts, or ``block`` does not divide a row.
    """
    parameters = all_parameters_of(model, "quantize_replica_gathers")
    check_block("block", block)
    if dtype is not None:
        check_dtype("dtype", dtype)
    in_parts = [parameter for parameter in parameters if parameter.handle.has_parts]
    if not in_parts:
        raise Zero3Error(
            "quantize_replica_gathers: replicas have no parts of shards: call fully_shard with a "
            "mesh [replicate, shard] and shard_optimizer_over_replicas=True"
        )
    formats = [format_of_parameter(dtype, block, parameter) for parameter in in_parts]
    for parameter, format in zip(in_parts, formats, strict=True):
        parameter.handle.encode_parts(format)
