"""Findings of ranks about their parameters, which all ranks of a mesh exchange."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch.distributed as dist

from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.transport.json_collectives import all_gather_json

# The process groups of a mesh: see DataParallel.process_groups.
ProcessGroups: TypeAlias = tuple[dist.ProcessGroup, ...]


def by_mesh(parameters: Iterable[ShardedParameter]) -> dict[ProcessGroups, list[ShardedParameter]]:
    """Returns ``parameters`` by the groups that they are sharded and replicated over.

    Small meshes come first. The order is the same on all ranks.
    """
    result: dict[ProcessGroups, list[ShardedParameter]] = {}
    for parameter in sorted(parameters, key=lambda p: (p.layout.ranks.mesh.size(), p.fqn)):
        result.setdefault(parameter.layout.ranks.process_groups, []).append(parameter)
    return result


def all_gather_lines(what: str, lines: Sequence[str], groups: ProcessGroups) -> list[str]:
    """Returns the ``lines`` of all ranks of a mesh, each once. Collective over its ``groups``.

    The result for a small mesh among the lines for a larger one reaches all ranks of that.
    """
    for group in groups:  # first the shards' group, then the replicas': these get complete lines
        of_ranks = all_gather_json(what, lines, group)
        lines = list(dict.fromkeys(each for theirs in of_ranks for each in theirs))
    return list(lines)


def shortened(lines: Sequence[str]) -> str:
    """Returns the first of ``lines``, and how many more there are."""
    more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
    return "; ".join(lines[:8]) + more
