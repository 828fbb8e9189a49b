"""What quantizing parameters before they are gathered saves and costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from deepcompile_zero3.codec import nbytes_of
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.tools.table import Table, and_more, mib


@dataclass(frozen=True)
class Quantized:
    """A parameter whose shards are quantized before they are gathered."""

    parameter: str  #: FQN
    format: str  #: dtype of the codes, and block, such as "float8_e4m3fn/128"
    nbytes: int  #: of the full parameter, as it is computed with
    sent: int  #: bytes of codes and scales of the full parameter
    #: Largest absolute rounding error of this rank's finite elements; 0 without values.
    largest_error: float


def quantized(
    parameters: Sequence[ShardedParameter], formats: Mapping[str, str]
) -> tuple[Quantized, ...]:
    """Returns those of ``parameters`` that are quantized, by the ``formats`` of their FQNs."""
    found = []
    for parameter in parameters:
        format = formats.get(parameter.fqn)
        if format:
            shard = parameter.handle.shard
            codes = _C.quantize(shard, format)
            sizes = parameter.handle.sizes
            back = torch.zeros(shard.shape, dtype=torch.float32, device=shard.device)
            _C.dequantize(back, codes, format)
            sent = nbytes_of(format, sizes[0], math.prod(sizes[1:]))
            found.append(
                Quantized(parameter.fqn, format, parameter.nbytes, sent, _largest(back - shard))
            )
    return tuple(found)


def _largest(errors: torch.Tensor) -> float:
    if errors.is_meta or errors.numel() == 0:
        return 0.0
    return errors.nan_to_num(0, 0, 0).abs().max().item()


def table_of(found: Sequence[Quantized]) -> Table:
    """Returns a table of quantized parameters, with a row for each run of one format."""
    rows = []
    for format, run in groupby(found, lambda each: each.format):
        alike = list(run)
        rows.append(
            (
                and_more([each.parameter for each in alike]),
                format,
                mib(sum(each.nbytes for each in alike)),
                mib(sum(each.sent for each in alike)),
                f"{max(each.largest_error for each in alike):.2e}",
            )
        )
    return Table("", ("quantizes", "format", "MiB", "sent", "largest rounding error"), rows)
