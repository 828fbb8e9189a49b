"""``quantize_gradients``: gradients travel as codes of one byte and scales."""

import torch
from torch import nn

from deepcompile_zero3.codec import check_block, check_dtype
from deepcompile_zero3.errors import Zero3Error, check_bool
from deepcompile_zero3.features.quantized.formats import can_be_quantized, format_of_parameter
from deepcompile_zero3.sharding.module_parameters import all_parameters_of


def quantize_gradients(
    model: nn.Module,
    dtype: torch.dtype | None,
    *,
    block: int | None = None,
    error_feedback: bool = False,
) -> None:
    """Makes backwards of ``model`` from now on send quantized gradients.

    Each rank casts a gradient to the leaf's ``grad_dtype``, quantizes it with a scale for each
    block, and sends every other rank its rows, once. Ranks add what they receive in fp32, in the
    order of ranks, then divide the sum and cast it to the dtype of ``.grad``. A sum is never
    quantized. This replaces ``MixedPrecisionPolicy(reduce_dtype=...)`` for parameters of two or
    more dimensions; gradients of others travel as before. So do sums over the replicas of a 2-D
    mesh. Call it on all ranks, between steps; graphs that are compiled already obey it.

    NaN stays NaN. Infinity stays infinity in float8_e5m2 and becomes NaN in the other dtypes. Zeros
    stay zeros.

    Args:
        model: a module whose parameters are sharded, on ranks that exchange messages.
        dtype: dtype of the codes: ``torch.int8``, ``torch.float8_e4m3fn`` or
            ``torch.float8_e5m2``. None ends quantization.
        block: number of elements in a block, which must divide a row: the elements behind one
            index of the sharded dimension. None takes 128 where that divides a row, or else the
            whole row.
        error_feedback: whether a rank adds what quantizing a gradient has lost to its next one. It
            costs fp32 memory for the full gradients on each rank, and the errors are not part of a
            checkpoint.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``dtype``, ``block`` or ``error_feedback`` is not one of these.
        Zero3Error: nothing in ``model`` is sharded, ranks share memory and send nothing, ``block``
            does not divide a row, or gradients wait for their reduction.

    Source: qgZ of ZeRO++, https://arxiv.org/abs/2306.10209.
    """
    parameters = all_parameters_of(model, "quantize_gradients")
    check_bool("error_feedback", error_feedback)
    check_block("block", block)
    if dtype is not None:
        check_dtype("dtype", dtype)
    formats = []
    for parameter in parameters:
        if parameter.handle.has_gradients():
            raise Zero3Error(
                f"quantize_gradients: gradients of '{parameter.fqn}' wait for their reduction: "
                "call it after a backward that reduces them"
            )
        is_quantized = dtype is not None and can_be_quantized(parameter.shard)
        if is_quantized and not parameter.handle.can.sends_messages:
            raise Zero3Error(
                f"quantize_gradients: the ranks of '{parameter.fqn}' share the memory of one host "
                "and send no gradients. To try it there, call fully_shard(..., transport='c10d')"
            )
        formats.append(format_of_parameter(dtype, block, parameter))
    for parameter, format in zip(parameters, formats, strict=True):
        dtypes = parameter.settings.gradient_dtypes.with_quantized(format, error_feedback)
        parameter.settings = parameter.settings.replace(gradient_dtypes=dtypes)
        parameter.handle.forget_error()
