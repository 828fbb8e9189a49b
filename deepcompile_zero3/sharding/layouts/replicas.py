"""Comparison of the values of replicas, which have to be the same."""

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.module_parameters import by_mesh
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.transport.json_collectives import all_gather_json, all_gather_lines, shorten
from deepcompile_zero3.transport.rank_names import rank_names

_COMPARISON = "comparison of replicas"
_CHECK = "values of replicas"  # behind the checks of features, by its name


def compare_replicas(parameters: Iterable[ShardedParameter]) -> None:
    """Makes the first backward that reduces ``parameters`` compare their replicas."""
    for parameter in parameters:
        if parameter.layout.ranks.replicate_group is not None:
            parameter.checks[_CHECK] = _different_replicas


def _different_replicas(delivered: Sequence[tuple[ShardedParameter, object]]) -> str:
    """Returns an error message if replicas of parameters differ, or "". Collective.

    Compares all parameters that share a model and a mesh with one of these, until they are equal
    once: only here do all ranks of a mesh meet after a model has got its values.
    """
    uncompared = {parameter for parameter, _ in delivered}
    meshes = {(parameter.model, parameter.layout.ranks.process_groups) for parameter in uncompared}
    uncompared.update(
        parameter
        for model, groups in meshes
        if model is not None
        for parameter in model.parameters
        if parameter.layout.ranks.process_groups == groups and _CHECK in parameter.checks
    )
    told: list[str] = []
    for groups, members in by_mesh(uncompared).items():
        told = all_gather_lines(_COMPARISON, told + _differences(members, groups[-1]), groups)
        # Ranks of this mesh remember what all of them were told by now. Only some of them may be
        # told more, on the next mesh.
        for parameter in members if not told else ():
            del parameter.checks[_CHECK]
    if not told:
        return ""
    return (
        f"replicas have different values, and stay different: {shorten(told)}. Before training, "
        "give all replicas the same values: call torch.manual_seed with one seed on all ranks "
        "before the model is built or initialized, load one checkpoint, or broadcast the values of "
        "one replica. Name parameters that are meant to differ in ignored_params of fully_shard"
    )


def _differences(parameters: Sequence[ShardedParameter], replicas: dist.ProcessGroup) -> list[str]:
    """Returns which shards of ``parameters`` differ from the first replica's. Collective."""
    names = rank_names(replicas)
    mine = {parameter.fqn: _checksum_or_error(parameter) for parameter in parameters}
    of_ranks = all_gather_json(_COMPARISON, mine, replicas)
    found = []
    for fqn in mine:
        values = {name: theirs.get(fqn) for name, theirs in zip(names, of_ranks, strict=True)}
        found += [f"on rank {r}, {error}" for r, error in values.items() if isinstance(error, str)]
        compared = [name for name, value in values.items() if isinstance(value, int)]
        if None in values.values():  # it was loaded since
            continue
        found += [
            f"'{fqn}' on rank {name} is not what it is on rank {compared[0]}"
            for name in compared
            if values[name] != values[compared[0]]
        ]
    return found


def _checksum_or_error(parameter: ShardedParameter) -> int | str | None:
    """Returns a hash of the shard, or an error message: other ranks wait for either."""
    try:
        local = torch_internals.local_tensor(parameter.refresh())
        return parameter.layout.value_of_replica(local)
    except Zero3Error as error:
        return str(error)
    except Exception as error:
        return f"'{parameter.fqn}': {error}"
