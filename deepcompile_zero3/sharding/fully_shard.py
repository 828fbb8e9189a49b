"""``fully_shard``: builds, connects, installs and names the sharded parameters of a module."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

import deepcompile_zero3.plugins.sources  # adds kinds of parameters, and layouts
import deepcompile_zero3.plugins.steps  # noqa: F401 (adds what looks at steps)
from deepcompile_zero3 import torch_internals
from deepcompile_zero3.fsdp2.state import FsdpState
from deepcompile_zero3.sharding import conversion
from deepcompile_zero3.sharding.budget import BudgetPolicy
from deepcompile_zero3.sharding.forward.casts import ForwardCasts
from deepcompile_zero3.sharding.forward.swap import original_class, swap_class
from deepcompile_zero3.sharding.gradients import delivery
from deepcompile_zero3.sharding.group import ParameterGroup
from deepcompile_zero3.sharding.layouts.layout import DataParallelRanks, Layout
from deepcompile_zero3.sharding.layouts.replicas import compare_replicas
from deepcompile_zero3.sharding.model import ShardedModel
from deepcompile_zero3.sharding.module import groups_in
from deepcompile_zero3.sharding.module_parameters import modules_to_shard, parameters_of
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.setup import arguments
from deepcompile_zero3.sharding.setup.blueprint import blueprint_of, resolve_reshard
from deepcompile_zero3.sharding.setup.build import (
    agree_on_model_number,
    build,
    caught,
    process_groups_of,
    raise_on_all_ranks,
)
from deepcompile_zero3.sharding.setup.placement import CHANGES, resolve_layout
from deepcompile_zero3.sharding.setup.private_references import check_private_references
from deepcompile_zero3.sharding.setup.replaced_parameters import ignore, replace, sharded_as
from deepcompile_zero3.transport.choice import TransportName, resolve
from deepcompile_zero3.transport.connection import Connector
from deepcompile_zero3.transport.timeouts import warn_of_default_timeouts

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
    transport: TransportName = "auto",
    shard_optimizer_over_replicas: bool = False,
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

    The signature, except for the last two arguments, and the meaning are those of
    :func:`torch.distributed.fsdp.fully_shard`; see
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. The call is collective:
    all ranks of the mesh make it, in one order.

    Args:
        module: a block or model. Ranks must hold the same values. Buffers move to the mesh's
            device, unless they are on the meta device. A list of modules makes one group of all
            their parameters. Within the forward of an enclosing sharded module, eager code frees
            these parameters when the last module of the list has run. A parameter may be a tensor
            subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, or a frozen one that
            can be sliced along its rows.
        mesh: a 1-D mesh, or a 2-D mesh whose last dimension shards and whose first dimension
            replicates. The default is all ranks of the job, on the accelerator if there is one,
            else on the CPU.
        reshard_after_forward: True: backward gathers parameters again. False: forward keeps what it
            gathered for backward. None: the compiler chooses within its option ``keep_mb``; eager
            code gathers again. An int: after forward, parameters are sharded over that many ranks,
            neighbors in the mesh, and backward gathers from those. Where ranks share memory, only
            True bounds the memory of gathered parameters; otherwise the host holds one copy of
            each.
        shard_placement_fn: a function that takes a parameter and returns its ``Shard``, or None for
            ``Shard(0)``. The size of the dimension need not be divisible by the number of ranks.
            It may also return an :class:`Owned`: one rank has the full parameter and gets its full
            gradient, for optimizers that need matrices; :class:`MatrixOwners` is such a function.
            From torch 2.13 on, it may return FSDP2's ``ShardPlacementResult``, which has a mesh
            for this parameter.
        mp_policy: dtypes of computation (``param_dtype``), of gradients on the wire
            (``reduce_dtype``) and of the forward's outputs (``output_dtype``).
        offload_policy: ``CPUOffloadPolicy``, as in FSDP2: shards, their gradients and so optimizer
            states are in host memory, page-locked unless ``pin_memory`` is False. It has no effect
            where the mesh is on the CPU. :class:`FileOffloadPolicy`: a budget of memory, only for
            meshes on the CPU.
        ignored_params: parameters to leave as they are, in or outside of the module. Each rank
            trains its own.
        dp_mesh_dims: a ``DataParallelMeshDims`` of torch. It names the dimensions of ``mesh`` to
            shard over and those of replicas. Parameters are DTensors on all of ``mesh`` then, and
            are read as such: ``Replicate()`` on the named dimensions. ``mesh`` may have more.
        transport: how ranks exchange shards and gradients. ``"shared_memory"``: memory that ranks
            share, which must all be on one host and compute on its CPU; otherwise an error says
            which rank cannot and why. ``"c10d"``: messages of the process group, also to itself if
            a rank is alone. ``"auto"``: shared memory where possible, unless the environment
            variable ``ZERO3_TRANSPORT`` names another transport for the whole process. See
            ``docs/one_host.md``.
        shard_optimizer_over_replicas: whether replicas, on a 2-D mesh, have a part of each shard
            to step, in place of all of it. Parameters, gradients and optimizer states are DTensors
            over both dimensions then, which both shard, on the mesh [shard, replicate].
            Ranks keep the shard that they compute from too, in ``param_dtype``. After a step, the
            next forward gathers it over the replicas once. Each byte of a parameter and of a
            gradient then crosses between replicas once a step. See ``docs/layouts.md``.

    Returns:
        ``module``, which is now a :class:`Zero3Module` too.

    Raises:
        Zero3Error: the module cannot be sharded correctly, or another rank has raised. An error
            about ``mesh`` or ``dp_mesh_dims`` stays on its rank. The module is left unchanged.
        TypeError, ValueError: an argument has a wrong type or value.
        NotImplementedError: an argument is not supported yet.
    """
    mesh = arguments.default_mesh() if mesh is None else mesh
    spmd = arguments.resolve_dp_mesh_dims(mesh, dp_mesh_dims)
    ranks_of = functools.cache(DataParallelRanks)
    ranks_of_mesh = ranks_of(mesh) if spmd is None else spmd.ranks
    modules: list[nn.Module] = []
    ignored: set[nn.Parameter] = set()
    failures: list[Exception] = []
    with caught(failures):
        modules = _outermost(module)
        ignored = arguments.resolve_ignored(ignored_params)
        arguments.check_policy(mp_policy)
        arguments.check_offloading(mesh, offload_policy, modules)
        transport = resolve(transport)
        for each in modules:
            arguments.check_module(each, ignored)
        new = _new_parameters(modules, ignored)
        check_private_references(modules, functools.partial(_fqn_of, modules, new))
        layouts: dict[nn.Parameter, Layout] = {
            parameter: arguments.offloaded(
                resolve_layout(fqn, parameter, ranks_of_mesh, shard_placement_fn, ranks_of, spmd),
                fqn,
                parameter,
                offload_policy,
            )
            for parameter, (fqn, _, _) in new.items()
        }
        if shard_optimizer_over_replicas:
            arguments.check_divided(mesh, offload_policy)
            divide = CHANGES["shard_optimizer_over_replicas"]
            layouts = {each: divide(new[each][0], each, layouts[each]) for each in new}
        # A rank that has nothing to shard over ``mesh`` takes part in the exchange, too.
        meshes = dict.fromkeys([ranks_of_mesh, *(layout.ranks for layout in layouts.values())])
        reshards = {r: resolve_reshard(reshard_after_forward, r) for r in meshes}
        blueprints = [
            blueprint_of(place, parameter, layouts[parameter], mp_policy, reshard_after_forward)
            for parameter, place in new.items()
        ]
        # A warning may be an error, on the first rank of a group alone.
        warn_of_default_timeouts(group for ranks in meshes for group in ranks.process_groups)
    raise_on_all_ranks(
        "fully_shard: arguments",
        failures.pop() if failures else None,
        process_groups_of([ranks_of_mesh], _new_parameters(modules, ignored), modules),
    )
    connects = {
        ranks: Connector(
            ranks.shard_group,
            ranks.device,
            transport,
            take_turns=reshard is True and ranks_after_forward is None,
            after_forward=ranks_after_forward,
        )
        for ranks, (reshard, ranks_after_forward) in reshards.items()
    }
    delivery.connect_runtime()
    built, failure = build(blueprints, connects)
    try:
        number = agree_on_model_number(modules, failure, process_groups_of(meshes, new, modules))
    finally:
        failure = None  # its traceback holds this frame and all that was built
    compare_replicas(built.values())
    if isinstance(offload_policy, BudgetPolicy):
        for sharded in built.values():
            offload_policy.budget.add(sharded)
    _install(modules, built, ignored, ranks_of_mesh.device)
    ignore(ignored, modules)
    group = ParameterGroup(list(built.values()), ForwardCasts(mp_policy), connects, len(modules))
    for each in modules:
        swap_class(each, group)
        each.register_load_state_dict_post_hook(conversion.after_load)
        torch_internals.set_fsdp_state(each, FsdpState(each, group))
        torch_internals.register_forward_hooks(each, group.pre_forward, group.post_forward)
    _register_model(modules, group, number)
    return module


def _outermost(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """Returns the given modules that are not submodules of another given module."""
    if isinstance(module, nn.Module):
        return [module]
    if not isinstance(module, list | tuple):
        raise TypeError(f"fully_shard takes an nn.Module, got {type(module).__name__}")
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
) -> dict[nn.Parameter, tuple[str, nn.Module, str]]:
    """Returns the parameters that no earlier call took, each once.

    Each has its first name, the module that registers it, and its name there.
    """
    new: dict[nn.Parameter, tuple[str, nn.Module, str]] = {}
    for prefix, submodule in modules_to_shard(modules):
        for attribute, parameter in submodule._parameters.items():
            if parameter is None or parameter in ignored or sharded_as(parameter) is not None:
                continue
            fqn = f"{prefix}.{attribute}".lstrip(".")
            new.setdefault(parameter, (fqn, submodule, attribute))
    return new


def _fqn_of(
    modules: Sequence[nn.Module],
    new: Mapping[nn.Parameter, tuple[str, nn.Module, str]],
    tensor: torch.Tensor,
) -> str | None:
    """Returns the name of a tensor that is one of ``new``, or became a shard earlier."""
    if isinstance(tensor, nn.Parameter) and tensor in new:
        return new[tensor][0]
    known = sharded_as(tensor)
    if known is None:
        return None
    named = (each for module in modules for each in module.named_parameters())
    return next((fqn for fqn, parameter in named if parameter is known.shard), known.fqn)


def _install(
    modules: Sequence[nn.Module],
    built: Mapping[nn.Parameter, ShardedParameter],
    ignored: set[nn.Parameter],
    device: torch.device,
) -> None:
    """Puts the shards into the modules in place of the parameters, tied ones included.

    Buffers move to ``device``.
    """
    for _, submodule in modules_to_shard(modules):
        sharded: dict[str, ShardedParameter] = dict(parameters_of(submodule))
        for attribute, parameter in list(submodule._parameters.items()):
            if parameter is None or parameter in ignored or attribute in sharded:
                continue
            known = sharded_as(parameter)
            if known is None:
                known = built[parameter]
                known.install()
                replace(parameter, known)
            else:
                known.registered.tie(submodule, attribute)
            sharded[attribute] = known
        if sharded:
            if not parameters_of(submodule):
                submodule.register_load_state_dict_pre_hook(conversion.before_load)
                submodule.register_state_dict_pre_hook(conversion.before_state_dict)
            submodule.__dict__["_zero3_parameters"] = sharded
            if submodule not in modules:
                swap_class(submodule)
        for buffer in submodule._buffers.values():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                buffer.data = buffer.to(device)


def _register_model(modules: list[nn.Module], group: ParameterGroup, number: int) -> None:
    """Creates the ``ShardedModel`` of ``modules``, and registers its parameters with the runtime.

    ``modules`` are the outermost sharded modules now. Their parameters are named by their places.
    """
    model_module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    groups = groups_in(model_module)
    parameters = [parameter for g in groups for parameter in g.parameters]
    for child in groups:
        if child is not group and child.parent is None:
            child.parent = group

    # The first sharded model of a process has plain names. Names in another model begin with its
    # class and number. Numbers follow the order of the fully_shard calls. The number of a deleted
    # model is free again.
    label = "" if number == 1 else f"{original_class(modules[0]).__name__}:{number}."
    fqns = {id(tensor): fqn for fqn, tensor in model_module.named_parameters()}
    model = ShardedModel(number, parameters)
    for child in groups:
        child.model = model
    places = {each: place for place, each in enumerate(fqns)}
    # In the order of modules, which is mostly that of uses.
    for parameter in sorted(parameters, key=lambda p: places.get(id(p.shard), len(places))):
        fqn = fqns.get(id(parameter.shard))  # None: its module was deleted
        parameter.join(model, parameter.fqn if fqn is None else label + fqn)
