"""A parameter that ``fully_shard`` is about to shard, as the call's arguments describe it."""

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from deepcompile_zero3.sharding.layout import Layout


class Blueprint(NamedTuple):
    """A parameter that is to be sharded.

    Attributes:
        parameter: the parameter as the user built it.
        module: the first module that registers it.
        attribute: its name there.
        layout: its layout over the ranks.
        mp_policy: the policy with the parameter's own ``param_dtype``.
        full: the tensor [rows, ...] that is computed with, on meta.
        reshard_after_forward: see :class:`ShardedParameter`.
        described: a description that is the same on all ranks.
    """

    parameter: nn.Parameter
    module: nn.Module
    attribute: str
    layout: Layout
    mp_policy: MixedPrecisionPolicy
    full: torch.Tensor
    reshard_after_forward: bool | None
    described: str
