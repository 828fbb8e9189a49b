"""Checks and resolves the arguments of ``fully_shard``."""

import dataclasses
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.sharding.budget import BudgetPolicy
from deepcompile_zero3.sharding.forward.swap import original_class
from deepcompile_zero3.sharding.layouts.layout import Layout
from deepcompile_zero3.sharding.layouts.spmd_mesh import SpmdMesh
from deepcompile_zero3.sharding.module import Zero3Module, groups_in
from deepcompile_zero3.sharding.module_parameters import (
    modules_to_shard,
    parameters_of,
    registered_in,
)
from deepcompile_zero3.sharding.source import kind_of
from deepcompile_zero3.transport.process_groups import exists
from deepcompile_zero3.transport.timeouts import timeout_of


def resolve_dp_mesh_dims(mesh: DeviceMesh, dp_mesh_dims: Any) -> SpmdMesh | None:
    """Returns ``mesh`` with the dimensions that ``dp_mesh_dims`` names, or None without it.

    Raises:
        TypeError: ``mesh`` is not a mesh, or ``dp_mesh_dims`` is not a ``DataParallelMeshDims``.
        ValueError: ``dp_mesh_dims`` names a dimension twice or one that ``mesh`` lacks; or it is
            None, and ``mesh`` has neither one nor two dimensions.
        NotImplementedError: this release of torch has no such argument, or ``dp_mesh_dims`` names
            no dimension to shard over.
    """
    if dp_mesh_dims is None:
        check_mesh(mesh)
        return None
    _check_is_mesh(mesh)
    kind = getattr(fsdp, "DataParallelMeshDims", None)
    if kind is None:
        raise NotImplementedError("dp_mesh_dims needs torch 2.13")
    if not isinstance(dp_mesh_dims, kind):
        raise TypeError(f"dp_mesh_dims is a DataParallelMeshDims of torch, got {dp_mesh_dims!r}")
    shard, replicate = dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names
    if not shard:
        raise NotImplementedError(
            f"{dp_mesh_dims!r} shards nothing: name a dimension to shard over, perhaps of size 1"
        )
    named = [*shard, *replicate]
    if len({*named}) < len(named) or not {*named} <= {*(mesh.mesh_dim_names or ())}:
        raise ValueError(f"{dp_mesh_dims!r} has to name dimensions of {mesh}, each once")
    return SpmdMesh(mesh, shard, replicate)


def default_mesh() -> DeviceMesh:
    """Returns a mesh of all ranks; raises a Zero3Error without a process group."""
    if not dist.is_initialized():
        raise Zero3Error(
            "fully_shard needs a process group: call torch.distributed.init_process_group() first "
            "(under torchrun), or pass mesh="
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator else "cpu"
    world = cast(dist.ProcessGroup, dist.group.WORLD)
    if accelerator is None or dist.get_backend() != "gloo":
        return init_device_mesh(device_type, (world.size(),))
    for known in list(_default_meshes):
        if not exists(known):
            del _default_meshes[known]
    if world not in _default_meshes:
        _default_meshes[world] = mesh = init_device_mesh(device_type, (world.size(),))
        torch_internals.set_timeout(timeout_of(world), mesh.get_group())
    return _default_meshes[world]


# Over gloo on accelerators, where each call of init_device_mesh makes a process group.
_default_meshes: dict[dist.ProcessGroup, DeviceMesh] = {}


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises for a mesh that parameters cannot be sharded over."""
    _check_is_mesh(mesh)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a mesh of one or two dimensions, got {mesh}: slice those that "
            'compute on different data out of it, mesh["replicate", "shard"]'
        )


def _check_is_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a DeviceMesh, got {mesh!r}: make one with init_device_mesh, or from a "
            "process group with DeviceMesh.from_group"
        )


def check_offloading(
    mesh: DeviceMesh, offload_policy: OffloadPolicy, modules: Iterable[nn.Module]
) -> None:
    """Raises for an offload policy that is not supported on ``mesh``, or that differs from the
    policy of a module inside ``modules``.
    """
    to_file = isinstance(offload_policy, BudgetPolicy) and mesh.device_type == "cpu"
    to_host = isinstance(offload_policy, CPUOffloadPolicy)
    if type(offload_policy) is not OffloadPolicy and not to_file and not to_host:
        raise NotImplementedError(
            f"fully_shard does not support offload_policy={offload_policy!r} on "
            f"{mesh.device_type!r} yet"
        )
    budget = getattr(offload_policy, "budget", None)
    for parameter in (parameter for each in modules for parameter in registered_in(each)):
        if budget is not None and parameter.budget not in (None, budget):
            raise ValueError(
                f"fully_shard got another offload_policy than for '{parameter.fqn}': make one "
                "FileOffloadPolicy, whose budget is for the whole model, and pass it to all calls"
            )


def offloaded(
    layout: Layout, fqn: str, parameter: nn.Parameter, offload_policy: OffloadPolicy
) -> Layout:
    """Returns ``layout`` with the shards where ``offload_policy`` wants them.

    Raises:
        NotImplementedError: ``parameter`` is a tensor subclass and would be offloaded.
    """
    is_on_cpu = layout.ranks.mesh.device_type == "cpu"
    if is_on_cpu or not isinstance(offload_policy, CPUOffloadPolicy):
        return layout
    if kind_of(parameter) is not None:
        raise NotImplementedError(
            f"'{fqn}' is a {type(parameter).__name__}, a tensor subclass, which "
            "CPUOffloadPolicy does not offload yet: shard its module without the policy"
        )
    return dataclasses.replace(layout, offload=offload_policy)


def check_divided(mesh: DeviceMesh, offload_policy: OffloadPolicy) -> None:
    """Raises unless replicas on ``mesh`` may have parts of shards."""
    if mesh.ndim == 1:
        raise ValueError(
            f"shard_optimizer_over_replicas=True needs a mesh [replicate, shard], got {mesh}: on "
            "one dimension, the optimizer is sharded over all ranks already"
        )
    if isinstance(offload_policy, BudgetPolicy):
        raise NotImplementedError(
            f"shard_optimizer_over_replicas=True does not support offload_policy={offload_policy!r}"
        )


def check_policy(policy: MixedPrecisionPolicy) -> None:
    """Raises if ``policy`` is not a policy, or has dtypes that gradients cannot have."""
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, got {policy!r}; to "
            "compute in a dtype, pass MixedPrecisionPolicy(param_dtype=...)"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype not in (None, *grad_dtype.DTYPES):
            raise ValueError(
                f"{name} of mp_policy is {dtype!r}; it is None or one of "
                f"{', '.join(map(str, grad_dtype.DTYPES))}"
            )


def resolve_ignored(parameters: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    """Returns ``ignored_params`` as a set; raises a TypeError if it has anything but parameters."""
    ignored = set() if parameters is None else set(parameters)
    for each in ignored:
        if not isinstance(each, nn.Parameter):
            raise TypeError(f"ignored_params is a set of nn.Parameters, got one with {each!r}")
    return ignored


def check_module(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raises unless ``module`` can be sharded."""
    kind = original_class(module).__name__
    if isinstance(module, Zero3Module):
        raise Zero3Error(f"fully_shard was called twice on the same {kind}: remove one call")
    if getattr(module.forward, "__name__", "") == "_forward_unimplemented":
        raise Zero3Error(
            f"a {kind} has no forward, so nothing would say when its parameters are needed: call "
            "fully_shard on the modules in it instead"
        )
    if any(group.is_finalized_manually for group in groups_in(module)):
        raise Zero3Error(
            "a module inside has set_manual_backward_finalization(True): call it on the "
            "outermost module, after the last fully_shard"
        )
    for submodule in module.modules():
        if isinstance(submodule, Zero3Module):
            for sharded in submodule._zero3_group.parameters:
                _ = sharded.shard  # raises if the parameter was replaced
    for prefix, submodule in modules_to_shard([module]):
        name = original_class(submodule).__name__
        where = f"'{prefix}' ({name})" if prefix else f"the {kind}"
        if isinstance(submodule, FSDPModule):
            raise Zero3Error(
                f"{where} was sharded by torch's fully_shard already: use one of the two for all"
            )
        if isinstance(submodule, torch.jit.ScriptModule):
            raise Zero3Error(
                f"{where} is a ScriptModule, whose parameters cannot be replaced: shard the "
                "module itself, and use torch.compile in place of torch.jit"
            )
        if parameters_of(submodule):
            inside = f" in the {kind}" if prefix else ""
            raise Zero3Error(
                f"the parameters of {where}{inside} were sharded already, with an enclosing module "
                "or with another module that has it too: call fully_shard on the blocks first, and "
                "on the model last"
            )
        for attribute, parameter in submodule._parameters.items():
            if parameter is not None and parameter not in ignored:
                _check_parameter(f"{prefix}.{attribute}".lstrip("."), parameter)


def _check_parameter(fqn: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise Zero3Error(f"'{fqn}' has no shape yet: run the lazy module once before fully_shard")
    local = torch_internals.local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
    if torch_internals.is_wrapper(local):
        name = type(local).__name__
        is_flat = hasattr(local, "__tensor_flatten__")
        kind = kind_of(local)
        if isinstance(parameter, DTensor) or kind is None or not is_flat:
            raise NotImplementedError(
                f"'{fqn}' is a {name}, a tensor subclass, and fully_shard supports those that have "
                "fsdp_pre_all_gather and fsdp_post_all_gather, or, if frozen, whose inner tensors "
                "have a row for each row of the parameter, and are no part of a DTensor: pass it "
                "in ignored_params"
            )
        kind.check(fqn, local, parameter.requires_grad)
    if parameter.is_complex():
        raise Zero3Error(
            f"'{fqn}' is {parameter.dtype}, which cannot be communicated: keep it as a "
            "real tensor, torch.view_as_real, or pass it in ignored_params"
        )
    if parameter.layout != torch.strided:
        raise Zero3Error(f"'{fqn}' is {parameter.layout}; only dense parameters can be sharded")
    grad_dtype.check(fqn, parameter)
