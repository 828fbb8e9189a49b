"""The options of the ``zero3`` backend."""

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from deepcompile_zero3.codec import check_block, check_dtype
from deepcompile_zero3.errors import check_bool
from deepcompile_zero3.guides import Guide

# Inductor's settings that are refused, and why.
REFUSED_SETTINGS = {
    "triton.cudagraphs": "graphs that gather parameters are not captured as CUDA graphs",
    "selective_decompose": "torch then does not tell which inputs of a graph are parameters",
}


def refused_setting(config: Mapping[str, Any]) -> str | None:
    """Returns the name of a setting of Inductor in ``config`` that is refused, or None."""
    return next((name for name in REFUSED_SETTINGS if config.get(name)), None)


class Schedule(NamedTuple):
    """The options of :class:`Options` that say how graphs gather.

    Attributes:
        gather_bucket_mb: maximum size of one all-gather, in MiB of full parameters.
        gathers_ahead: number of all-gathers that are in flight ahead of their use.
        keep_mb: maximum size in MiB, or infinity, of what forwards keep for backward.
    """

    gather_bucket_mb: float
    gathers_ahead: int
    keep_mb: float


@dataclass(frozen=True)
class Options:
    """Options of ``torch.compile(model, backend="zero3", options={...})``.

    Attributes:
        inductor: whether Inductor compiles the rewritten graphs. False runs them op by op, for
            debugging.
        inductor_config: Inductor's settings for these graphs, as in ``options`` of
            ``backend="inductor"``, such as ``{"max_autotune": True}``. torch does not take ``mode``
            beside ``options``: set the mode's settings here. The runtime computes products that are
            large gradients, without tuning.
        gather_bucket_mb: maximum size of one all-gather, in MiB of full parameters. A larger
            parameter is gathered alone. Two buckets are alive at once: the one in use and the next.
        gathers_ahead: number of all-gathers that are in flight while a graph computes with an
            earlier one, at least 1. Each after the first keeps one more bucket alive.
        keep_mb: maximum size in MiB, or infinity, of the full parameters that a model's compiled
            forwards keep for backward where ``reshard_after_forward`` is None. What backward needs
            first is kept first, and backward gathers the others again. 0 keeps nothing. If a model
            is compiled in several graphs, each may keep a part in proportion to the bytes of its
            parameters. Ranks that share memory keep nothing by this choice, since a gather in
            backward costs nothing there. The compiler never overrules True and False of
            ``reshard_after_forward``, and eager code ignores this option.
        activations_mb: size in MiB, or infinity, of the activations that the compiled forwards of a
            model leave on the GPU for backward, beside those that cannot leave it. The others wait
            in page-locked host memory, and copies in both directions run beside the computation.
            Graphs share the limit as they share ``keep_mb``. CPUs refuse it.
        fp32_weight_grads: whether matmuls of bf16 or fp16 operands return the fp32 sum where they
            compute only a gradient whose ``grad_dtype`` is float32 or None. Eager PyTorch rounds
            the sum first.
        regions: whether equal blocks, which are modules that ``fully_shard`` was called on, are
            compiled once for all of them. None means if Inductor compiles them: op by op there is
            nothing to share. Ignored with ``fp32_weight_grads``.
        gather_dtype: dtype to which floating-point parameters of two or more dimensions are
            quantized for all-gathers, with a scale for each block: ``torch.float8_e4m3fn``,
            ``torch.float8_e5m2`` or ``torch.int8``. Or a function ``(name, parameter) -> dtype |
            None``. None, the default, quantizes nothing. Graphs compute with the rounded values,
            and optimizers step the unrounded shards. Eager code is not affected. Quantized gathers
            are messages, even where ranks share memory.
        gather_block: number of elements in a block, which must divide a row: the elements behind
            one index of the sharded dimension. None takes 128 where that divides a row, or else
            the whole row.
        passes: passes of yours over the rewritten graphs; see :class:`GraphPass`.
    """

    inductor: bool = True
    inductor_config: Mapping[str, Any] = field(default_factory=dict)
    gather_bucket_mb: float = 64.0
    gathers_ahead: int = 1
    keep_mb: float = 64.0
    activations_mb: float = float("inf")
    fp32_weight_grads: bool = False
    regions: bool | None = None
    gather_dtype: torch.dtype | Callable[[str, nn.Parameter], torch.dtype | None] | None = None
    gather_block: int | None = None
    passes: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("inductor", "fp32_weight_grads"):
            check_bool(f"option '{name}'", getattr(self, name))
        if not isinstance(self.regions, bool | None):
            raise ValueError(f"option 'regions' must be a bool or None, got {self.regions!r}")
        if self.gather_dtype is not None and not callable(self.gather_dtype):
            check_dtype("option 'gather_dtype'", self.gather_dtype)
        check_block("option 'gather_block'", self.gather_block)
        if self.gather_block is not None and self.gather_dtype is None:
            raise ValueError("option 'gather_block' needs 'gather_dtype'")
        if not isinstance(self.passes, list | tuple):
            raise ValueError(f"option 'passes' must be a list of passes, got {self.passes!r}")
        if not isinstance(self.inductor_config, Mapping):
            raise ValueError(
                f"option 'inductor_config' must be a dict, got {self.inductor_config!r}"
            )
        if self.inductor_config and not self.inductor:
            raise ValueError("option 'inductor_config' needs 'inductor': True")
        if (refused := refused_setting(self.inductor_config)) is not None:
            raise NotImplementedError(
                f"option 'inductor_config' has {refused!r}: True, but {REFUSED_SETTINGS[refused]}: "
                f"leave it out. See {Guide.COMPILED_CODE}"
            )
        if type(self.gathers_ahead) is not int or self.gathers_ahead < 1:
            raise ValueError(
                f"option 'gathers_ahead' must be a positive integer, got {self.gathers_ahead!r}"
            )
        infinity = float("inf")
        for name, least, most, what in (
            ("gather_bucket_mb", sys.float_info.min, 2**40, "a positive number, 2**40 at most"),
            ("keep_mb", 0, infinity, "a number of at least 0, or infinity"),
            ("activations_mb", 0, infinity, "a number of at least 0, or infinity"),
        ):
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value <= most:
                raise ValueError(f"option '{name}' must be {what}, got {value!r}")

    @property
    def schedule(self) -> Schedule:
        """The options that are a schedule."""
        return Schedule(self.gather_bucket_mb, self.gathers_ahead, self.keep_mb)

    @property
    def bytes_ahead(self) -> int:
        """Bytes of full parameters that may be in flight while a graph computes with others."""
        largest = 2**63 - 1
        return min(int(min(self.gathers_ahead, largest) * self.gather_bucket_mb * 2**20), largest)

    def with_schedule(self, schedule: Schedule) -> "Options":
        """Returns these options with another schedule."""
        return replace(self, **schedule._asdict())

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> "Options":
        """Returns the options in ``options``.

        Raises:
            ValueError: a key is unknown, and the message lists the known ones; or a value is not
                valid.
            NotImplementedError: a setting of Inductor is refused, such as CUDA graphs.
        """
        known = [f.name for f in fields(Options)]
        unknown = sorted(set(options or ()) - set(known))
        if unknown:
            near = difflib.get_close_matches(unknown[0], known, 1)
            raise ValueError(
                f"unknown option {', '.join(map(repr, unknown))} of backend 'zero3'; "
                + "".join(f"did you mean {name!r}? " for name in near)
                + f"The options are {', '.join(map(repr, known))}"
            )
        return Options(**(options or {}))
