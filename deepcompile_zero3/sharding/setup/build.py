"""Connects and builds the parameters of a ``fully_shard`` call: on all ranks, or on none."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.layouts.layout import DataParallelRanks
from deepcompile_zero3.sharding.module import groups_in
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.setup.blueprint import Blueprint
from deepcompile_zero3.transport.connection import Connection, Connector
from deepcompile_zero3.transport.json_collectives import all_gather_json, check_all_alike
from deepcompile_zero3.transport.rank_names import learn_hosts, this_rank


def build(
    blueprints: Sequence[Blueprint], connects: Mapping[DataParallelRanks, Connector]
) -> tuple[dict[nn.Parameter, ShardedParameter], Exception | None]:
    """Returns the sharded parameters, or the first error. Collective.

    An error is not raised here: the rank still takes part in the exchange that follows.

    ``connects`` are keyed by the ranks that parameters are sharded over.
    """
    failures: list[Exception] = []  # such as out of memory
    connection_of: dict[nn.Parameter, Connection] = {}
    for ranks, connect in connects.items():
        members = [each for each in blueprints if each.layout.ranks is ranks]
        described = [each.described for each in members]
        with caught(failures):
            if ranks.replicate_group is not None:
                _check_all_alike(described, ranks.replicate_group)
        with caught(failures):
            _check_all_alike(described, ranks.shard_group)
            layouts = [each.layout.row_layout(each.full.shape[0]) for each in members]
            connections = connect([each.full for each in members], layouts)
            for each, connection in zip(members, connections, strict=True):
                connection_of[each.parameter] = connection
    built: dict[nn.Parameter, ShardedParameter] = {}
    if not failures:
        with caught(failures):
            for each in blueprints:
                built[each.parameter] = ShardedParameter(each, connection_of[each.parameter])
    return built, failures.pop() if failures else None


def _check_all_alike(described: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raises Zero3Error unless all ranks of ``group`` shard the same parameters. Collective."""
    check_all_alike(
        "fully_shard: parameters",
        described,
        group,
        remedy="build the same model with the same mp_policy, shard_placement_fn and "
        "reshard_after_forward on all ranks",
    )


@contextlib.contextmanager
def caught(failures: list[Exception]) -> Iterator[None]:
    """Keeps an exception that the block raises, if it is the first."""
    try:
        yield
    except Exception as error:
        if not failures:
            failures.append(error)


def agree_on_model_number(
    modules: Sequence[nn.Module], failure: Exception | None, groups: Sequence[dist.ProcessGroup]
) -> int:
    """Returns a number for the sharded model that is free on all ranks. Collective.

    One rank may have collected a deleted model that another rank has not.

    Raises:
        Zero3Error: see :func:`raise_on_all_ranks`.
    """
    inner = {g.model.number for each in modules for g in groups_in(each) if g.model}
    in_use = _C.live_model_numbers() - inner
    of_ranks = raise_on_all_ranks("fully_shard: outcome", failure, groups, sorted(in_use))
    in_use = in_use.union(*of_ranks)
    return next(number for number in itertools.count(1) if number not in in_use)


def raise_on_all_ranks(
    what: str,
    failure: Exception | None,
    groups: Sequence[dist.ProcessGroup],
    value: Any = None,
) -> list[Any]:
    """Returns the values of all ranks of ``groups``, in any order, or raises on all. Collective.

    Args:
        what: the step of ``fully_shard``.
        failure: the error that this rank has to raise, or None.
        groups: process groups of the ranks.
        value: value of this rank, for the others; JSON can encode it.

    Raises:
        Zero3Error: another rank has a ``failure``. This rank's own failure is raised as it is.
    """
    me = dist.get_rank()
    failures = {} if failure is None else {me: f"{type(failure).__name__}: {failure}"}
    values = [value]
    try:
        for group in groups:
            mine = [values, list(failures.items()), this_rank()]
            values = []
            for theirs, of_rank, rank in all_gather_json(what, mine, group):
                values += [each for each in theirs if each not in values]
                failures |= dict(of_rank)
                learn_hosts([rank])
        if failure is not None:
            raise failure
    except Zero3Error as error:
        raise failure or error from None
    finally:
        failure = None  # its traceback holds this frame, and all that was built
    if failures:
        raise Zero3Error(
            "fully_shard has failed on rank "
            + "; on rank ".join(f"{rank}: {why}" for rank, why in sorted(failures.items()))
            + ". Nothing is sharded, on any rank"
        )
    return values


def process_groups_of(
    meshes: Iterable[DataParallelRanks],
    parameters: Iterable[nn.Parameter],
    modules: Sequence[nn.Module],
) -> list[dist.ProcessGroup]:
    """Returns the process groups that shard the model of ``modules``, in one order on all ranks.

    ``modules`` are the model, or will be.
    """
    groups = [group for ranks in meshes for group in ranks.process_groups]
    for parameter in parameters:  # sharded by tensor parallelism
        if isinstance(parameter, DTensor):
            groups += parameter.device_mesh.get_all_groups()
    for sharded in (p for each in modules for g in groups_in(each) for p in g.parameters):
        groups += sharded.layout.ranks.process_groups
    return [g for g in dict.fromkeys(groups) if g.size() > 1]
