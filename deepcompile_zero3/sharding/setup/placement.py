"""Resolves the ``shard_placement_fn`` of ``fully_shard`` to layouts."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.layouts.layout import DataParallelRanks, Layout, MakesLayout
from deepcompile_zero3.sharding.layouts.spmd_mesh import SpmdMesh
from deepcompile_zero3.sharding.setup import arguments
from deepcompile_zero3.sharding.source import kind_of

# Changes of a layout that arguments of ``fully_shard`` ask for, by the name of the argument. Each
# takes a name, a parameter and its layout.
CHANGES: dict[str, Callable[[str, nn.Parameter, Layout], Layout]] = {}


def resolve_layout(
    fqn: str,
    parameter: nn.Parameter,
    ranks: DataParallelRanks,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    ranks_of: Callable[[DeviceMesh], DataParallelRanks],
    spmd: SpmdMesh | None,
) -> Layout:
    """Returns the layout of ``parameter`` on ``ranks``, or the one that the user asks for.

    ``ranks_of`` returns the same object for the same mesh. With ``spmd``, the parameter is a
    DTensor on that mesh.
    """
    if not (shard_placement_fn is None or callable(shard_placement_fn)):
        raise TypeError(
            "shard_placement_fn is a function of a parameter that gives a Shard, an Owned, a "
            f"ShardPlacementResult or None, got {shard_placement_fn!r}"
        )
    placement = None if shard_placement_fn is None else shard_placement_fn(parameter)
    on_mesh = torch_internals.placement_on_mesh(placement)
    if on_mesh is not None:
        placement, mesh, dims = on_mesh
        if spmd is not None:
            raise ValueError(
                f"shard_placement_fn gave a mesh for '{fqn}', and dp_mesh_dims says that all "
                "parameters are on one: leave either out"
            )
        arguments.check_mesh(mesh)
        if dims != ((None, 0) if mesh.ndim == 1 else (0, 1)):
            raise ValueError(
                f"shard_placement_fn gave {mesh} for '{fqn}', replicating over dimension {dims[0]} "
                f"and sharding over {dims[1]}: the last dimension shards, and the first of two "
                "replicates"
            )
        ranks = ranks_of(mesh)
    if placement is None:
        if parameter.dim() == 0:
            return _layout_along(None, fqn, parameter, ranks, spmd)
        placement = Shard(0)
    if isinstance(placement, MakesLayout):
        return placement.layout_of(fqn, parameter, ranks, spmd is not None)
    if not isinstance(placement, Shard):
        raise TypeError(
            f"shard_placement_fn gave {placement!r} for '{fqn}'; it gives a Shard, an Owned, a "
            "ShardPlacementResult or None"
        )
    dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
    if dim not in range(parameter.dim()):
        raise ValueError(
            f"shard_placement_fn gave {placement!r} for '{fqn}', which has {parameter.dim()} "
            "dimensions, counted from 0"
        )
    is_nameless = ranks.mesh.ndim > 1 and not ranks.mesh.mesh_dim_names
    kind = kind_of(parameter)
    if kind is not None and is_nameless and kind.needs_mesh_names(parameter):
        raise ValueError(
            f"'{fqn}' is a {type(parameter).__name__} with fsdp_pre_all_gather, which gets the "
            "mesh of the shards: pass mesh_dim_names to init_device_mesh"
        )
    if dim != 0 and kind is not None:
        raise NotImplementedError(
            f"shard_placement_fn gave {placement!r} for '{fqn}', a {type(parameter).__name__}, "
            "a tensor subclass, which is sharded on dimension 0"
        )
    return _layout_along(dim if parameter.numel() else None, fqn, parameter, ranks, spmd)


def _layout_along(
    dim: int | None,
    fqn: str,
    parameter: nn.Parameter,
    ranks: DataParallelRanks,
    spmd: SpmdMesh | None,
) -> Layout:
    if spmd is not None:
        _check_on_spmd_mesh(fqn, parameter, spmd)
    if not isinstance(parameter, DTensor):
        return Layout.of(parameter, ranks, dim)
    if any(p.is_partial() for p in parameter.placements):
        raise Zero3Error(
            f"'{fqn}' is a DTensor by {parameter.placements}: redistribute it to Shard or Replicate"
        )
    if spmd is not None:
        return spmd.layout_of(parameter, dim)
    try:
        return Layout.of(parameter, ranks, dim)
    except RuntimeError as error:
        raise Zero3Error(
            f"'{fqn}' is a DTensor over {parameter.device_mesh}, which cannot be sharded over "
            f"{ranks.mesh} too ({error}): pass mesh= of the other dimension of one mesh, such as "
            'mesh["dp"] of init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        ) from error


def _check_on_spmd_mesh(fqn: str, parameter: nn.Parameter, spmd: SpmdMesh) -> None:
    names = spmd.mesh.mesh_dim_names
    if not isinstance(parameter, DTensor) or parameter.device_mesh != spmd.mesh:
        where = parameter.device_mesh if isinstance(parameter, DTensor) else "no mesh"
        raise ValueError(
            f"with dp_mesh_dims all parameters are DTensors on mesh={spmd.mesh}, but '{fqn}' is on "
            f"{where}: call distribute_module or distribute_tensor first"
        )
    if not all(parameter.placements[i].is_replicate() for i in (*spmd.shard, *spmd.replicate)):
        raise ValueError(
            f"'{fqn}' is {parameter.placements} on the dimensions {names} of its mesh: it has to "
            "be Replicate() on those that dp_mesh_dims names"
        )
