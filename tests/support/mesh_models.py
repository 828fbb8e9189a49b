"""Shared parts of the tests of meshes: models, meshes, and a step beside one process."""

import importlib

import pytest
import torch.distributed as dist
from support.models import assert_same_gradients, assert_same_parameters, mean_square, mine, step
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

either_way = pytest.mark.parametrize("how", ["interpreted", "eager"])


def mesh_dims(*args, **kwargs):
    """Returns torch's ``DataParallelMeshDims``, or skips the test where torch has none."""
    kind = getattr(fsdp, "DataParallelMeshDims", None)
    if kind is None:
        pytest.skip("this torch has no DataParallelMeshDims")
    return kind(*args, **kwargs)


def fsdp2_common():
    """Returns the module that has FSDP2's ``ShardPlacementResult``."""
    return importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")


def replicas(number=2):
    """Returns the mesh of all ranks with ``number`` replicas of each shard."""
    return init_device_mesh(
        "cpu", (number, dist.get_world_size() // number), mesh_dim_names=("replicate", "shard")
    )


def assert_same_step(model, reference, batch, *, run=None, optimizers=(), group=None):
    """Takes a step with both models, on the whole batch and on this rank's part of it, and compares
    losses, gradients and parameters.

    Args:
        run: called in place of ``model``.
        group: the ranks that take different parts.
    """
    loss = mean_square(model if run is None else run, mine(batch, group))
    loss.backward()
    whole = mean_square(reference, batch)
    whole.backward()
    assert mean_of(loss, group) == pytest.approx(whole.item(), rel=1e-5)
    assert_same_gradients(model, reference)
    step(optimizers)
    assert_same_parameters(model, reference)


def mean_of(loss, group=None):
    """Returns the mean over the ranks."""
    dist.all_reduce(loss := loss.detach().clone(), group=group)
    return loss.item() / dist.get_world_size(group)


def data_and_tensor_parallel():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tensor_parallel(model, mesh):
    """Parallelizes the Stack ``model``; the sequences of its second block are sharded too."""
    first, second = model.blocks
    parallelize_module(first, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(second, mesh, plan)
    part = {"input_layouts": Replicate(), "desired_input_layouts": Shard(0)}
    parallelize_module(second, mesh, PrepareModuleInput(**part, use_local_output=True))
    whole = {"output_layouts": Shard(0), "desired_output_layouts": Replicate()}
    parallelize_module(second, mesh, PrepareModuleOutput(**whole))
    return model


def sharded_by(shard, model, **kwargs):
    """Returns ``model`` after its blocks and itself are sharded by ``shard``."""
    for block in model.blocks:
        shard(block, **kwargs)
    return shard(model, **kwargs)
