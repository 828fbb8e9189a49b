"""Passes and formats of features."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import fx

from deepcompile_zero3.features.offload import activations
from deepcompile_zero3.features.quantized import gathers
from deepcompile_zero3.features.regions import reductions, regions
from deepcompile_zero3.features.wide_gradients import widen
from deepcompile_zero3.options import Options
from deepcompile_zero3.passes.blocks import IsBlock
from deepcompile_zero3.passes.facts import ParameterFacts
from deepcompile_zero3.passes.graph_pass import GraphPass
from deepcompile_zero3.passes.region_facts import RegionFacts

if TYPE_CHECKING:
    from deepcompile_zero3.sharding.parameter import ShardedParameter
    from deepcompile_zero3.sharding.source import Source


class MakesPasses(Protocol):
    """Makes a feature's passes over the forward and the backward of a graph."""

    def __call__(
        self, parameters: "Sequence[ShardedParameter]", share: float, options: Options
    ) -> Sequence[GraphPass]:
        """Returns passes, of the same names for all graphs.

        Args:
            parameters: those of the graph, perhaps none.
            share: the share of their models' bytes that they have.
            options: the backend's options.
        """


class RewritesCaptured(Protocol):
    """Rewrites Dynamo's graph, ahead of AOTAutograd."""

    def __call__(
        self,
        gm: fx.GraphModule,
        parameters: Mapping[fx.Node, ParameterFacts],
        is_block: IsBlock,
        options: Options,
    ) -> Mapping[str, RegionFacts]:
        """Returns the facts of the regions that it has made, by name.

        Args:
            gm: Dynamo's graph, after ``lift_unshards``.
            parameters: the graph's inputs that are parameters.
            is_block: whether ``fully_shard`` was called on modules of a class.
            options: the backend's options.
        """


class ChoosesFormats(Protocol):
    """Chooses in which format sources are gathered. Formats are text: see ``codec``."""

    def format_of_gather(self, source: "Source", options: Options) -> str:
        """Returns the format of ``source``; empty if the feature leaves it as it is."""

    def check_of(
        self, sources: "Collection[Source]", formats: Sequence[str], options: Options
    ) -> "Callable[[Sequence[Source]], None] | None":
        """Returns a check of the sources that a graph runs with, or None if it needs none.

        Args:
            sources: those that the graph was compiled for.
            formats: their formats.
            options: the options of the graph.
        """


# Those that follow one pass of the core run in this order.
PASSES: list[MakesPasses] = [
    activations.passes,
    widen.passes,
    reductions.passes,
]
CAPTURED: list[RewritesCaptured] = [
    regions.outline,
]
FORMATS: list[ChoosesFormats] = [
    gathers,
]
