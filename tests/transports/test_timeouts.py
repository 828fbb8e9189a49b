"""How long ranks wait for each other: timeouts of process groups, and a warning of long ones."""

import re
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.models import Stack
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from deepcompile_zero3 import Zero3Error, fully_shard
from deepcompile_zero3.transport.process_groups import flat_submesh
from deepcompile_zero3.transport.timeouts import timeout_of

GIVEN = timedelta(seconds=7)  # to init_process_group
DEFAULT = timedelta(minutes=30)  # torch's, of gloo


def _warnings_of(mesh):
    """Returns what ``fully_shard`` warns of on this rank, in three calls."""
    model = Stack()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    told = [each for each in caught if "wait" in str(each.message)]
    assert all(each.filename == __file__ for each in told)
    return [str(each.message) for each in told]


def _of_a_mesh():
    """Shards over a mesh of torch's; does what the warning says, and shards again."""
    _set_pg_timeout(GIVEN)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert {timeout_of(group) for group in mesh.get_all_groups()} == {DEFAULT}
    told = _warnings_of(mesh)
    of_first = [told]
    dist.broadcast_object_list(of_first)
    remedy = "\n".join(re.findall(r"^    (.*)$", of_first[0][0], re.MULTILINE))
    exec(remedy, {"mesh": mesh, "torch": torch, "timedelta": timedelta})
    assert {timeout_of(group) for group in mesh.get_all_groups()} == {GIVEN}
    return told


@pytest.mark.gloo  # whose groups' timeouts these are
def test_groups_that_wait_for_longer_than_was_asked_for_are_named_once_with_a_remedy(run_ranks):
    first, second, third, fourth = run_ranks(4, _of_a_mesh)
    (message,) = first
    assert "'mesh_replicate' of ranks [0, 2] for 0:30:00" in message
    assert "'mesh_shard' of ranks [0, 1] for 0:30:00" in message
    assert "init_process_group was given 0:00:07" in message
    assert "docs/hosts.md#start" in message
    assert "'mesh_replicate' of ranks [1, 3]" in second[0]
    assert "'mesh_shard' of ranks [2, 3]" in third[0]
    assert fourth == []  # the first rank of no group


def _of_which_warnings_are_errors():
    _set_pg_timeout(GIVEN)
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = Stack()
    who = UserWarning if dist.get_rank() == 0 else Zero3Error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(who, match="a rank that does not come is missed late"):
            fully_shard(model, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.gloo
def test_a_warning_that_is_an_error_is_one_on_all_ranks(run_ranks):
    run_ranks(2, _of_which_warnings_are_errors)


def _chosen(given, of_group):
    _set_pg_timeout(given)
    group = dist.new_group(timeout=of_group)
    assert _warnings_of(DeviceMesh.from_group(group, "cpu")) == []
    assert timeout_of(group) == (of_group or DEFAULT)


@pytest.mark.parametrize(
    ("given", "of_group"),
    [(GIVEN, timedelta(hours=2)), (GIVEN, timedelta(seconds=1)), (timedelta(hours=1), None)],
    ids=["longer", "shorter", "default"],
)
def test_a_time_that_somebody_chose_is_kept_and_not_warned_of(run_ranks, given, of_group):
    run_ranks(2, _chosen, given, of_group)


def _flattened():
    mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("dp", "cp", "tp"))
    for name, minutes in {"cp": 2, "tp": 1}.items():
        _set_pg_timeout(timedelta(minutes=minutes), mesh.get_group(name))
    flat = flat_submesh(mesh, ("cp", "tp"))
    assert timeout_of(flat.get_group()) == timedelta(minutes=2)
    _set_pg_timeout(GIVEN, flat.get_group())
    assert timeout_of(flat_submesh(mesh, ("cp", "tp")).get_group()) == GIVEN


@pytest.mark.gloo
def test_a_group_of_several_dimensions_waits_as_long_as_those_of_one(run_ranks):
    run_ranks(2, _flattened)
