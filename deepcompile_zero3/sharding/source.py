"""The sources that are gathered for a parameter: its own shard, or other tensors in its place.

Graphs, buckets and messages know sources alone. A :class:`ShardedParameter` is its own source. A
feature that gathers other tensors in the place of some parameters adds a :class:`Kind` to
:data:`KINDS`. The kind recognizes these parameters, and makes a :class:`Substitute` for each, whose
sources have no gradient.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from deepcompile_zero3.facts import SourceFacts
from deepcompile_zero3.runtime import _C

if TYPE_CHECKING:
    from deepcompile_zero3.sharding.parameter import ShardedParameter
    from deepcompile_zero3.sharding.setup.blueprint import Blueprint

# Attribute of a placeholder: a weak reference to its source.
_PLACEHOLDER_OF = "_zero3_placeholder_of"
# Attribute of a tensor in the metadata of a substitute.
_IS_METADATA = "_zero3_is_metadata"


class Source(Protocol):
    """Something that is gathered.

    Attributes:
        facts: all that graphs depend on.
    """

    facts: SourceFacts

    @property
    def handle(self) -> _C.Parameter | _C.Source:
        """The source in the C++ runtime, or the parameter that has it."""

    @property
    def placeholder(self) -> torch.Tensor:
        """The tensor that a traced graph takes in its place."""

    @property
    def parameter(self) -> "ShardedParameter":
        """The parameter that it is gathered for. Raises Zero3Error if its model was deleted."""

    @property
    def fqn(self) -> str:
        """Its name, for people."""

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part."""


class Substitute(Protocol):
    """The sources that are gathered in place of one parameter.

    Attributes:
        metadata: what compiled graphs read beside the gathered tensors. Each forward writes new
            values into its tensors.
    """

    metadata: Any

    @property
    def sources(self) -> Sequence[Source]:
        """The tensors, once something was gathered or traced."""

    @property
    def is_prepared(self) -> bool:
        """Whether a graph may read the sources and the metadata."""

    def take(self, local: torch.Tensor) -> Any:
        """Takes the shards of the sources from ``local``, the parameter's; returns the metadata."""

    def prepare_graph(self, local: torch.Tensor) -> None:
        """Takes shards and metadata for a graph that runs or is traced."""

    def prepare_op(self, source: Source, local: torch.Tensor) -> None:
        """Takes shards and metadata for an operator that gathers ``source``."""

    def full(self, gathered: Sequence[torch.Tensor], metadata: Any) -> torch.Tensor:
        """Returns the full parameter that the gathered sources make up."""


class Kind(Protocol):
    """A kind of parameters that others are gathered in place of."""

    def takes(self, local: torch.Tensor) -> bool:
        """Returns whether a whole parameter, or its shard, is of this kind."""

    def check(self, fqn: str, local: torch.Tensor, requires_grad: bool) -> None:
        """Raises NotImplementedError if ``local`` cannot be sharded."""

    def needs_mesh_names(self, local: torch.Tensor) -> bool:
        """Returns whether the dimensions of the mesh have to have names."""

    def described(self, fqn: str, full: nn.Parameter, param_dtype: torch.dtype | None) -> str:
        """Returns a description that has to be the same on all ranks.

        Raises NotImplementedError if ``full`` cannot be computed with in ``param_dtype``.
        """

    def chunk(
        self, full: torch.Tensor, group: dist.ProcessGroup, device: torch.device
    ) -> torch.Tensor | None:
        """Returns a copy of this rank's rows, or None to slice ``full`` like any tensor."""

    def substitute(self, parameter: "ShardedParameter", blueprint: "Blueprint") -> Substitute:
        """Returns the substitute of ``parameter``."""


KINDS: list[Kind] = []


def kind_of(local: torch.Tensor) -> Kind | None:
    """Returns the kind of a parameter, or of its shard, that others are gathered in place of."""
    return next((kind for kind in KINDS if kind.takes(local)), None)


def parameters_behind(sources: Iterable[Source]) -> "list[ShardedParameter]":
    """Returns the parameters that ``sources`` are gathered for, each once."""
    return list(dict.fromkeys(source.parameter for source in sources))


def facts_of_source(source: Source, process_group: str, **others: bool) -> SourceFacts:
    """Returns the facts of a connected source; the caller gives ``others`` by their names."""
    placeholder, can = source.placeholder, source.handle.can
    return SourceFacts(
        process_group=process_group,
        nbytes=placeholder.numel() * placeholder.element_size(),
        ndim=placeholder.dim(),
        gathers_views=can.gathers_views,
        publishes=can.publishes,
        sends_any_dtype=can.sends_any_dtype,
        is_trained=placeholder.requires_grad,
        **others,
    )


def name_placeholder(placeholder: torch.Tensor, source: Source) -> None:
    """Makes :func:`source_of` find ``source``, for as long as it lives."""
    setattr(placeholder, _PLACEHOLDER_OF, weakref.ref(source))


def mark_metadata(tensor: torch.Tensor) -> None:
    """Marks a tensor in the metadata of a substitute, which graphs take as an input."""
    setattr(tensor, _IS_METADATA, True)


def is_metadata(value: object) -> bool:
    """Returns whether a graph's input is a tensor in the metadata of a substitute."""
    return getattr(value, _IS_METADATA, False)


def source_of(placeholder: object) -> Source | None:
    """Returns the live source that has this placeholder, or None."""
    reference = getattr(placeholder, _PLACEHOLDER_OF, None)
    return None if reference is None else reference()
