"""Parameters and activations on one mesh, whose dimensions of data parallelism are named."""

import copy
import dataclasses
import math

import pytest
import torch
from support.mesh_models import assert_same_step, either_way, mesh_dims
from support.models import batch_of, compiled, mean_square, optimizers_of, relative_difference, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from deepcompile_zero3 import defer_reduction, deposit_grad, fully_shard


class OnMesh(nn.Module):
    """Layers that compute with DTensors on one mesh, on this rank's rows [rows, 8]."""

    def __init__(self, layers, mesh, data_parallel):
        super().__init__()
        self.layers = layers
        self.mesh = mesh
        self.placements = [
            Shard(0) if n in data_parallel else Replicate() for n in mesh.mesh_dim_names
        ]
        for layer, dim in ((layers[0], 0), (layers[2], 1)):
            for name, parameter in list(layer.named_parameters()):
                parallel = Shard(dim) if dim < parameter.dim() else Replicate()
                placements = [parallel if n == "tp" else Replicate() for n in mesh.mesh_dim_names]
                distributed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
                layer.register_parameter(name, distributed)

    def forward(self, x):
        x = DTensor.from_local(x, self.mesh, self.placements, run_check=False)
        return self.layers(x).redistribute(self.mesh, self.placements).to_local()


def _on_one_mesh(how, shape, names, dims):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    data_parallel = [*dims.shard_names, *dims.replicate_names]
    ours, theirs = (OnMesh(copy.deepcopy(layers), mesh, data_parallel) for _ in range(2))
    fully_shard(ours, mesh=mesh, dp_mesh_dims=dims)
    in_order = tuple(name for name in names if name in dims.shard_names)  # FSDP2 has no other
    torch_fully_shard(theirs, mesh=mesh, dp_mesh_dims=dataclasses.replace(dims, shard=in_order))
    run = compiled(ours, how)
    optimizers = optimizers_of(ours, theirs, layers)
    ranks = mesh.size() // (mesh["tp"].size() if "tp" in names else 1)
    part = 0
    for name, size, coordinate in zip(names, shape, mesh.get_coordinate(), strict=True):
        part = part * size + coordinate if name in data_parallel else part
    for seed in range(2):
        batch = batch_of(8, 8, seed=seed)
        for model, x in (
            (run, batch.chunk(ranks)[part]),
            (theirs, batch.chunk(ranks)[part]),
            (layers, batch),
        ):
            mean_square(model, x).backward()
        for (fqn, our), their, whole in zip(
            ours.named_parameters(), theirs.parameters(), layers.parameters(), strict=True
        ):
            assert our.placements == their.placements, fqn
            assert our.device_mesh == their.device_mesh, fqn
            assert relative_difference(our.grad.full_tensor(), whole.grad) < 1e-5, fqn
            assert relative_difference(their.grad.full_tensor(), whole.grad) < 1e-5, fqn
        step(optimizers)

    size = 8 // mesh["tp"].size() if "tp" in names else 8
    parts = [Partial() if p == Shard(0) else Shard(0) for p in ours.placements]
    with defer_reduction(ours):
        bias = ours.layers[0].bias
        deposit_grad(bias, DTensor.from_local(torch.ones(size), mesh, parts, run_check=False))
    assert torch.equal(bias.grad.full_tensor(), torch.ones(8))


@pytest.mark.thin
@pytest.mark.parametrize(
    ("shape", "names", "shard", "replicate"),
    [
        pytest.param((2, 1), ("dp", "tp"), "dp", None, marks=pytest.mark.long),
        ((2, 2), ("dp", "tp"), "dp", None),
        ((2, 2), ("tp", "dp"), "dp", None),
        ((2, 2), ("replicate", "dp"), "dp", "replicate"),
        ((2, 2, 1), ("dp", "cp", "tp"), ("cp", "dp"), None),
    ],
    ids=[
        "data parallel",
        "tensor parallel",
        "tensor parallel first",
        "replicas",
        "two dimensions",
    ],
)
@either_way
def test_parameters_and_activations_may_be_on_one_mesh(
    run_ranks, how, shape, names, shard, replicate
):
    dims = mesh_dims(shard=shard, replicate=replicate)
    run_ranks(math.prod(shape), _on_one_mesh, how, shape, names, dims)


def _sharded_around(shape, dims):
    """Shards over dimensions that have tensor parallelism's between them, which FSDP2 cannot."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "cp"))
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = OnMesh(copy.deepcopy(layers), mesh, ["dp", "cp"])
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert model.layers[0].weight.device_mesh.mesh_dim_names == ("dp_cp", "tp")
    optimizers = optimizers_of(model, layers)
    group = mesh["dp", "cp"]._flatten("dp_cp").get_group()
    run = compiled(model, "interpreted")
    for seed in range(2):
        batch = batch_of(8, 8, seed=seed)
        assert_same_step(model.layers, layers, batch, run=run, optimizers=optimizers, group=group)


def test_dimensions_that_shard_need_not_be_neighbors(run_ranks):
    run_ranks(4, _sharded_around, (2, 1, 2), mesh_dims(shard=("dp", "cp")))
