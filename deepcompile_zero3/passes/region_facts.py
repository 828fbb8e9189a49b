"""Facts of the regions of a graph: the subgraphs that it calls, which torch compiles once."""

from collections.abc import Mapping
from typing import TypeAlias

from torch import fx

from deepcompile_zero3.graph.calls import arguments_of, calls_by_region, graph_modules, region_named
from deepcompile_zero3.passes.facts import ParameterFacts

# Facts of the parameters among a region's inputs, by position.
RegionFacts: TypeAlias = Mapping[int, ParameterFacts]

_REGION = "zero3_region"  # key in meta["custom"] of a region's nodes, which tracers pass on


def marked_regions(
    gm: fx.GraphModule, parameters: Mapping[fx.Node, ParameterFacts]
) -> dict[str, RegionFacts]:
    """Returns facts of the regions that the user has marked in Dynamo's graph, by name.

    Args:
        gm: Dynamo's graph, after ``lift_unshards``.
        parameters: the graph's inputs that are parameters.
    """
    regions: dict[str, RegionFacts] = {}
    for name, calls in calls_by_region(gm).items():
        mark_region(region_named(gm, name), name)
        arguments = [pair for call in calls for pair in enumerate(arguments_of(call))]
        regions[name] = {i: parameters[node] for i, node in arguments if node in parameters}
    return regions


def mark_region(region: fx.GraphModule, name: str) -> None:
    """Marks the nodes of a region, so that :func:`region_of` finds it in a graph traced from it."""
    for node in (node for nested in graph_modules(region) for node in nested.graph.nodes):
        node.meta["custom"] = {**node.meta.get("custom", {}), _REGION: name}


def region_of(gm: fx.GraphModule) -> str | None:
    """Returns the name of the region that a joint graph was traced from, if any."""
    # AOTAutograd describes the inputs of the outermost graph, and of no region. Nodes of that graph
    # may have marks too: torch copies them to nodes of the backward, perhaps from other graphs.
    if any("desc" in node.meta for node in gm.graph.find_nodes(op="placeholder")):
        return None
    for node in gm.graph.nodes:
        name = node.meta.get("custom", {}).get(_REGION)
        if name is not None:
            return name
    return None
