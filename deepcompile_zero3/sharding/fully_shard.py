"""``fully_shard``: the function that users call, its checks, and the names of parameters."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding import (
    conversion,
    delivery,  # noqa: F401 (which the runtime calls)
)
from deepcompile_zero3.sharding.arguments import (
    check_module,
    check_policy,
    default_mesh,
    layout_of,
    policy_for,
    refuse_offloading,
    resolve_dp_mesh_dims,
    resolve_ignored,
    resolve_reshard,
    unsharded_modules,
)
from deepcompile_zero3.sharding.fsdp_state import FsdpState
from deepcompile_zero3.sharding.group import Connect, ParameterGroup
from deepcompile_zero3.sharding.layout import DataParallel, Layout
from deepcompile_zero3.sharding.model import ShardedModel
from deepcompile_zero3.sharding.module import Zero3Module
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.registered import parameters_of
from deepcompile_zero3.sharding.swap import original_class, swap_class
from deepcompile_zero3.transport.choice import Transport, resolve
from deepcompile_zero3.transport.connection import Connection, connect
from deepcompile_zero3.transport.json_collectives import all_gather_json, check_all_alike

# Attribute of a parameter that was sharded, for modules that are tied to it and come later.
_SHARDED_AS = "_zero3_sharded_as"

_AnyModule = TypeVar("_AnyModule", nn.Module, list[nn.Module])


def fully_shard(
    module: _AnyModule,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    transport: Transport = "auto",
) -> _AnyModule:
    """Shards the parameters of ``module`` over the ranks of ``mesh``, in place.

    Call it on the blocks of a model, then on the model. Each call makes one group of the parameters
    that no earlier call took. Eager code gathers one group at a time. After the call:

    * ``module.parameters()`` are DTensors with placement ``Shard(0)``, in the layout of
      ``torch.chunk`` and in their original dtype. Give them to the optimizer. A parameter that was
      a DTensor before, as tensor parallelism makes them, is now a DTensor over the ranks of both
      meshes.
    * In a forward, ``module.weight`` is the full tensor in ``mp_policy.param_dtype``, whether the
      forward runs in eager or under ``torch.compile`` with any backend. Outside a forward it is the
      DTensor.
    * After ``backward()``, ``parameter.grad`` is a DTensor of the same placement: the mean over the
      ranks.

    The signature, except for ``transport``, and the meaning are those of
    :func:`torch.distributed.fsdp.fully_shard`; see
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. The call is collective:
    all ranks of the mesh make it, in one order.

    Args:
        module: a block or model. Ranks must hold the same values. A list of modules makes one group
            of all their parameters. Within the forward of an enclosing sharded module, eager code
            frees these parameters when the last module of the list has run.
        mesh: a 1-D mesh, or a 2-D mesh whose last dimension shards and whose first dimension
            replicates. The default is all ranks of the job, on the accelerator if there is one,
            else on the CPU.
        reshard_after_forward: True: backward gathers parameters again. False: forward keeps what it
            gathered for backward. None: the compiler chooses within its option ``keep_mb``; eager
            code gathers again. An int: after forward, parameters are sharded over that many ranks,
            neighbours in the mesh, and backward gathers from those. Where ranks share memory, only
            True bounds the memory of gathered parameters; otherwise the host holds one copy of
            each.
        shard_placement_fn: a function that takes a parameter and returns its ``Shard``, or None for
            ``Shard(0)``. The size of the dimension need not be divisible by the number of ranks.
            From torch 2.13 on, it may also return FSDP2's ``ShardPlacementResult``, which has a
            mesh for this parameter.
        mp_policy: dtypes of computation (``param_dtype``), of gradients on the wire
            (``reduce_dtype``) and of the forward's outputs (``output_dtype``).
        offload_policy: ``CPUOffloadPolicy`` has no effect where the mesh is on the CPU, and is not
            supported elsewhere yet.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: a ``DataParallelMeshDims`` of torch. It names the dimensions of ``mesh`` to
            shard over and those of replicas. Parameters are DTensors on all of ``mesh`` then, and
            are read as such: ``Replicate()`` on the named dimensions. ``mesh`` may have more.
        transport: how ranks gather and reduce. ``"shared_memory"``: through memory that ranks
            share, which must all be on one host and compute on its CPU. ``"c10d"``: by messages of
            the process group. ``"auto"``: shared memory where possible, unless the environment
            variable ``ZERO3_TRANSPORT`` names another transport. See ``docs/one_host.md``.

    Returns:
        ``module``, which is now a :class:`Zero3Module` too.

    Raises:
        Zero3Error: the module cannot be sharded correctly. It is left unchanged.
        TypeError, ValueError: an argument has a wrong type or value.
        NotImplementedError: an argument is not supported yet.
    """
    mesh = default_mesh() if mesh is None else mesh
    spmd = resolve_dp_mesh_dims(mesh, dp_mesh_dims)
    refuse_offloading(mesh, offload_policy)
    check_policy(mp_policy)
    ignored = resolve_ignored(ignored_params)
    transport = resolve(transport)
    modules = _outermost(module)
    ranks_of = functools.cache(DataParallel)
    ranks_of_mesh = ranks_of(mesh) if spmd is None else spmd.ranks
    for each in modules:
        check_module(each, ignored)
        if any(group.is_finalized_manually for group in _groups_in(each)):
            raise Zero3Error(
                "a module inside has set_manual_backward_finalization(True): call it on the "
                "outermost module, after the last fully_shard"
            )
    names = _new_parameters(modules, ignored)
    layouts: dict[nn.Parameter, Layout] = {
        parameter: layout_of(fqn, parameter, ranks_of_mesh, shard_placement_fn, ranks_of, spmd)
        for parameter, fqn in names.items()
    }
    # A rank that has nothing to shard over ``mesh`` takes part in the exchange, too.
    meshes = list(dict.fromkeys([ranks_of_mesh, *(layout.ranks for layout in layouts.values())]))
    reshards = {ranks: resolve_reshard(reshard_after_forward, ranks) for ranks in meshes}
    policies = {
        parameter: policy_for(fqn, parameter, mp_policy) for parameter, fqn in names.items()
    }
    fulls = {
        parameter: layout.full_like(parameter, policies[parameter].param_dtype)
        for parameter, layout in layouts.items()
    }
    described = {
        parameter: f"'{fqn}' {list(fulls[parameter].shape)} of {fulls[parameter].dtype}, "
        f"strides {fulls[parameter].stride()}, "
        f"requires_grad={parameter.requires_grad}, grad_dtype={parameter.grad_dtype}, "
        f"reduce_dtype={mp_policy.reduce_dtype}, reshard_after_forward={reshard_after_forward}"
        for parameter, fqn in names.items()
    }
    built: dict[nn.Parameter, ShardedParameter] = {}
    connection_of: dict[nn.Parameter, Connection] = {}
    connect_over: dict[DataParallel, Connect] = {}
    failure: Exception | None = None  # such as out of memory: other ranks wait for this outcome
    for ranks in meshes:
        members = [p for p, layout in layouts.items() if layout.ranks is ranks]
        try:
            if ranks.replicate_group is not None:
                check_all_alike([described[p] for p in members], ranks.replicate_group)
        except Exception as error:
            failure = failure or error
        reshard, ranks_after_forward = reshards[ranks]
        connect_over[ranks] = functools.partial(
            connect,
            group=ranks.shard_group,
            device=ranks.device,
            transport=transport,
            take_turns=reshard is True and ranks_after_forward is None,
            after_forward=ranks_after_forward,
        )
        try:
            connections = connect_over[ranks](
                [fulls[p] for p in members], [described[p] for p in members]
            )
            connection_of.update(zip(members, connections, strict=True))
        except Exception as error:
            failure = failure or error
    try:
        if failure is None:
            for new, (submodule, attribute) in _places_of(layouts, modules).items():
                built[new] = ShardedParameter(
                    new,
                    submodule,
                    attribute,
                    layouts[new],
                    policies[new],
                    connection_of[new],
                    reshards[layouts[new].ranks][0],
                )
    except Exception as error:
        failure = error
    try:
        number = _agree_on_number(modules, failure, _process_groups_of(meshes, names, modules))
    finally:
        failure = None  # its traceback holds this frame and all that was built

    for _, submodule in unsharded_modules(modules):
        sharded: dict[str, ShardedParameter] = dict(parameters_of(submodule))
        for attribute, parameter in list(submodule._parameters.items()):
            if parameter is None or parameter in ignored or attribute in sharded:
                continue
            known = getattr(parameter, _SHARDED_AS, None)
            if known is None:
                known = built[parameter]
                known.install()
                setattr(parameter, _SHARDED_AS, known)
            else:
                submodule._parameters[attribute] = cast(nn.Parameter, known.shard)
            sharded[attribute] = known
        if sharded:
            submodule.__dict__["_zero3_parameters"] = sharded
            if submodule not in modules:
                swap_class(submodule)

    owned = list(built.values())
    group = ParameterGroup(owned, mp_policy, connect_over, len(modules))
    for each in modules:
        swap_class(each, group)
        each.register_load_state_dict_post_hook(conversion.after_load)
        torch_internals.set_fsdp_state(each, FsdpState(each, group))
        torch_internals.register_forward_hooks(each, group.pre_forward, group.post_forward)
    _settle_ownership(modules, group, number)
    return module


def _outermost(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """Returns the modules that do not lie inside others of them."""
    if not isinstance(module, list | tuple):
        return [module]
    modules = list(dict.fromkeys(module))
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard takes nn.Modules, got a list with {each!r}")
    if not modules:
        raise ValueError("fully_shard got an empty list of modules")
    inner = {id(m) for each in modules for m in each.modules() if m is not each}
    return [each for each in modules if id(each) not in inner]


def _new_parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, str]:
    """Returns the parameters that no earlier call took, each once, with its first name."""
    new: dict[nn.Parameter, str] = {}
    for prefix, submodule in unsharded_modules(modules):
        for attribute, parameter in submodule._parameters.items():
            if parameter is None or parameter in ignored or hasattr(parameter, _SHARDED_AS):
                continue
            new.setdefault(parameter, f"{prefix}.{attribute}".lstrip("."))
    return new


def _places_of(
    parameters: Iterable[nn.Parameter], modules: Sequence[nn.Module]
) -> dict[nn.Parameter, tuple[nn.Module, str]]:
    """Returns the first module that registers each parameter, and the name of the attribute."""
    places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for _, submodule in unsharded_modules(modules):
        for attribute, parameter in submodule._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, (submodule, attribute))
    return {parameter: places[parameter] for parameter in parameters}


def _process_groups_of(
    meshes: Sequence[DataParallel],
    parameters: Iterable[nn.Parameter],
    modules: Sequence[nn.Module],
) -> list[dist.ProcessGroup]:
    """Returns the process groups that shard the model of ``modules``, in one order on all ranks.

    ``modules`` are that model, or become it.
    """
    groups = [group for ranks in meshes for group in ranks.groups]
    for parameter in parameters:  # sharded by tensor parallelism
        if isinstance(parameter, DTensor):
            groups += parameter.device_mesh.get_all_groups()
    for group in (g for each in modules for g in _groups_in(each)):
        for sharded in group.parameters:
            groups += sharded.layout.ranks.groups
    return [g for g in dict.fromkeys(groups) if g.size() > 1]


def _agree_on_number(
    modules: Sequence[nn.Module], failure: Exception | None, groups: Sequence[dist.ProcessGroup]
) -> int:
    """Returns a number for the sharded model that is free on all ranks. Collective.

    One rank may have collected a deleted model that another rank has not.

    Raises:
        Zero3Error: another rank has a ``failure``. This rank's own failure is raised as it is.
    """
    inner = {g.model.number for each in modules for g in _groups_in(each) if g.model}
    in_use = _C.live_model_numbers() - inner
    me = dist.get_rank()
    failures = {} if failure is None else {me: f"{type(failure).__name__}: {failure}"}
    try:
        for group in groups:
            mine = [sorted(in_use), list(failures.items())]
            for theirs, of_rank in all_gather_json("fully_shard: outcome", mine, group):
                in_use = in_use | set(theirs)
                failures |= dict(of_rank)
    except Zero3Error as error:
        raise failure or error from None
    if failure is not None:
        raise failure
    if failures:
        raise Zero3Error(
            "fully_shard has failed on rank "
            + "; on rank ".join(f"{rank}: {why}" for rank, why in sorted(failures.items()))
            + ". Nothing is sharded, on any rank"
        )
    return next(number for number in itertools.count(1) if number not in in_use)


def _groups_in(module: nn.Module) -> list[ParameterGroup]:
    groups = (m._zero3_group for m in module.modules() if isinstance(m, Zero3Module))
    return list(dict.fromkeys(groups))


def _settle_ownership(modules: list[nn.Module], group: ParameterGroup, number: int) -> None:
    """Makes ``modules`` the outermost sharded modules of all inside them, and names parameters."""
    whole = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    groups = _groups_in(whole)
    parameters = [parameter for g in groups for parameter in g.parameters]
    for child in groups:
        if child is not group and child.parent is None:
            child.parent = group

    # The first sharded model of a process has plain names. Names in another model begin with its
    # class and number. Numbers follow the order of the fully_shard calls. The number of a deleted
    # model is free again.
    label = "" if number == 1 else f"{original_class(modules[0]).__name__}:{number}."
    names = {id(tensor): fqn for fqn, tensor in whole.named_parameters()}
    model = ShardedModel(number, parameters)
    for child in groups:
        child.model = model
    for parameter in parameters:
        name = names.get(id(parameter.shard))  # None: its module was deleted
        parameter.join(model, parameter.fqn if name is None else label + name)
