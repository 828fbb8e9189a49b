"""What graphs depend on: one frozen record for each source, and one for each parameter.

The text that Dynamo guards on, the keys of caches and what passes may use of a parameter (see
``passes.facts``) are made of all fields of these records. A new fact is one more field.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from deepcompile_zero3.options import Schedule


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Facts of a source: of a parameter's own shard, or of what is gathered in its place.

    Attributes:
        process_group: name of the process group of its shards, and in graphs a number, since names
            differ from run to run. Only neighbors of one group are gathered together.
        nbytes: size in bytes of the full tensor in the compute dtype.
        ndim: number of its dimensions.
        gathers_views: whether the gathered tensor is memory that nobody may write to.
        publishes: whether a backward reads its forward's publication, and moves bytes only if that
            is stale or overwritten.
        sends_any_dtype: whether its gradient is sent in its own dtype, if the wire dtype can hold
            it.
        is_trained: whether it needs a gradient.
        declares_grad_dtype: whether the contract must be declared to AOTAutograd.
        is_read_as_gathered: whether modules read the gathered tensor itself, not one made of it.
        is_gathered: whether it is gathered itself, and not others in its place.
        is_substitute: whether it is gathered in place of another one.
    """

    process_group: str | int
    nbytes: int
    ndim: int = 2
    gathers_views: bool = False
    publishes: bool = False
    sends_any_dtype: bool = False
    is_trained: bool = False
    declares_grad_dtype: bool = False
    is_read_as_gathered: bool = True
    is_gathered: bool = True
    is_substitute: bool = False


@dataclass(frozen=True, kw_only=True)
class LeafFacts:
    """Facts of a parameter, whatever is gathered for it.

    Attributes:
        reshard_after_forward: False keeps what forward gathered until backward has used it. None
            leaves the choice to ``passes.keep``; other passes treat it as True.
        leaf_dtype: dtype of the leaf's contract; None keeps whatever arrives.
        wire_dtype: dtype of its gradient on the wire; None keeps that of the contract.
        schedule: what graphs have in place of the schedule in the options, or None.
        budget: key of the budget of memory that the shard is part of; empty: none.
        model_nbytes: size in bytes of the full tensors of its model, which share ``keep_mb``.
    """

    reshard_after_forward: bool | None = True
    leaf_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    schedule: Schedule | None = None
    budget: str = ""
    model_nbytes: int = 0


def guard_key(leaf: LeafFacts, sources: Iterable[SourceFacts]) -> str:
    """Returns the text that Dynamo guards on where a graph reads a parameter.

    Texts of equal facts are one object, so that a guard that holds compares two pointers.
    """
    return sys.intern(" ".join(map(repr, (leaf, *sources))))
