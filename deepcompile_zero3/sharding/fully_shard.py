"""``fully_shard``: what the user calls, what it refuses, and how names are settled."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor, Shard

from deepcompile_zero3 import grad_dtype, torch_internals
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.group import ParameterGroup
from deepcompile_zero3.sharding.layout import DataParallel, Layout
from deepcompile_zero3.sharding.module import Zero3Module, original_class, parameters_of, swap_class
from deepcompile_zero3.sharding.parameter import ShardedModel, ShardedParameter, full_like
from deepcompile_zero3.transport import agree, one_host
from deepcompile_zero3.transport.process_groups import group_for_reductions, neighbours

# Set on a parameter that was sharded, for the modules that are tied to it and come later.
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
    transport: one_host.Transport = "auto",
) -> _AnyModule:
    """Shards the parameters of ``module`` over the ranks of ``mesh``, in place.

    Call it on the blocks of a model, then on the model: each call makes one group of the
    parameters that no earlier call took, and eager code gathers a group at a time. Afterwards

    * ``module.parameters()`` are DTensors, ``Shard(0)`` in the layout of ``torch.chunk``, in their
      original dtype. Give them to the optimizer. One that was a DTensor before, as tensor
      parallelism makes them, is one over the ranks of both meshes now.
    * In a forward, ``module.weight`` is the full tensor in ``mp_policy.param_dtype``, whether the
      forward runs in eager or under ``torch.compile`` with any backend. Outside, it is the DTensor.
    * After ``backward()``, ``parameter.grad`` is a DTensor of the same placement: the mean over
      the ranks.

    It has the signature, but for ``transport``, and the meaning of
    :func:`torch.distributed.fsdp.fully_shard`; see
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. It is collective: all
    ranks of the mesh call it, in one order.

    Args:
        module: the block or model. Ranks must hold the same values. Or a list of modules, whose
            parameters make one group: within the forward of a sharded module around them, eager
            code frees them when the last of the list has run.
        mesh: 1-D, or 2-D: shards are over its last dimension, and replicated over the first. By
            default all ranks of the job, on the accelerator if there is one, else on the CPU.
        reshard_after_forward: True: backward gathers again. False: what forward gathered is kept
            for backward. None: the compiler chooses within its option ``keep_mb``; eager code
            gathers again. An int: forward keeps its part of what it gathered, sharded over so many
            ranks, neighbours in the mesh, and backward gathers it from those. Where ranks share
            memory, only True bounds what gathered parameters take; otherwise the host holds one
            copy of each.
        shard_placement_fn: of a parameter, gives the ``Shard`` of another dimension than 0, or
            None. The dimension need not divide by the ranks.
        mp_policy: dtypes of computation (``param_dtype``), of gradients on the wire
            (``reduce_dtype``) and of the forward's outputs (``output_dtype``).
        offload_policy: ``CPUOffloadPolicy`` changes nothing where the mesh is on the CPU, and is
            not supported elsewhere yet.
        ignored_params: parameters left as they are.
        dp_mesh_dims: not supported yet.
        transport: how ranks gather and reduce. ``"shared_memory"``: through memory, where all of
            them are on one host and compute on its CPU. ``"c10d"``: by messages of the process
            group. ``"auto"``: the first where it is possible, unless the environment variable
            ``ZERO3_TRANSPORT`` names another. See ``docs/one_host.md``.

    Returns:
        ``module``, now a :class:`Zero3Module` too.

    Raises:
        Zero3Error: the module cannot be sharded rightly; it is unchanged.
        TypeError, ValueError: an argument of the wrong kind.
        NotImplementedError: an argument that is not supported yet.
    """
    mesh = _default_mesh() if mesh is None else mesh
    _refuse_unsupported(mesh, offload_policy, dp_mesh_dims)
    _check_policy(mp_policy)
    ignored = _ignored(ignored_params)
    transport = one_host.resolve(transport)
    modules = _outermost(module)
    ranks = DataParallel(mesh)
    reshard, ranks_after_forward = _resolve_reshard(reshard_after_forward, ranks)
    for each in modules:
        _check_module(each, ignored)
    names = _new_parameters(modules, ignored)
    layouts = {
        parameter: _layout_of(fqn, parameter, ranks, shard_placement_fn)
        for parameter, fqn in names.items()
    }
    policies = {
        parameter: _policy_for(fqn, parameter, mp_policy) for parameter, fqn in names.items()
    }
    fulls = [
        full_like(parameter, layout, policies[parameter]) for parameter, layout in layouts.items()
    ]
    described = [
        f"'{fqn}' {list(full.shape)} of {full.dtype}, strides {full.stride()}, "
        f"requires_grad={parameter.requires_grad}, grad_dtype={parameter.grad_dtype}, "
        f"reduce_dtype={mp_policy.reduce_dtype}, reshard_after_forward={reshard_after_forward}"
        for (parameter, fqn), full in zip(names.items(), fulls, strict=True)
    ]
    built: dict[nn.Parameter, ShardedParameter] = {}
    failure: Exception | None = None  # running out of memory, say: others wait for this rank's word
    try:
        if ranks.replicate_group is not None:
            one_host.check_alike(described, ranks.replicate_group)
    except Exception as error:
        failure = error
    try:
        parts = one_host.share(
            fulls,
            described,
            ranks.shard_group,
            mesh.device_type,
            transport,
            take_turns=reshard is True and ranks_after_forward is None,
        )
        shared = dict(zip(layouts, parts, strict=True)) if parts else {}
        group_after_forward = None
        if not parts:  # groups of our own are made by all ranks, before one of them may fail
            group_for_reductions(ranks.shard_group)
            if ranks_after_forward is not None:
                group_after_forward = neighbours(ranks.shard_group, ranks_after_forward)
        for new, (submodule, attribute) in _places_of(layouts, modules).items():
            built[new] = ShardedParameter(
                new,
                submodule,
                attribute,
                layouts[new],
                policies[new],
                reshard,
                shared.get(new),
                group_after_forward,
            )
    except Exception as error:
        failure = failure or error
    try:
        root = _agree_on_root(modules, failure, _process_groups_of(ranks, names, modules))
    finally:
        failure = None  # whose traceback has this frame, and all that was built

    for _, submodule in _unsharded_modules(modules):
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
    group = ParameterGroup(owned, mp_policy, len(modules))
    for each in modules:
        swap_class(each, group)
        each.register_forward_pre_hook(group.pre_forward, prepend=True, with_kwargs=True)
        each.register_forward_hook(group.post_forward, always_call=True)
    _settle_ownership(modules, group, root)
    return module


def _outermost(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """The modules, without those that lie in others of them."""
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
    """Those that no earlier call took, each once, and the first of their names."""
    new: dict[nn.Parameter, str] = {}
    for prefix, submodule in _unsharded_modules(modules):
        for attribute, parameter in submodule._parameters.items():
            if parameter is None or parameter in ignored or hasattr(parameter, _SHARDED_AS):
                continue
            new.setdefault(parameter, f"{prefix}.{attribute}".lstrip("."))
    return new


def _places_of(
    parameters: Iterable[nn.Parameter], modules: Sequence[nn.Module]
) -> dict[nn.Parameter, tuple[nn.Module, str]]:
    """The first module that has each, and its attribute."""
    places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for _, submodule in _unsharded_modules(modules):
        for attribute, parameter in submodule._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, (submodule, attribute))
    return {parameter: places[parameter] for parameter in parameters}


def _process_groups_of(
    ranks: DataParallel, parameters: Iterable[nn.Parameter], modules: Sequence[nn.Module]
) -> list[dist.ProcessGroup]:
    """Those over which ranks shard the model that ``modules`` are or become, in one order."""
    groups = [ranks.shard_group, ranks.replicate_group]
    for parameter in parameters:  # by tensor parallelism
        if isinstance(parameter, DTensor):
            groups += parameter.device_mesh.get_all_groups()
    for group in (g for each in modules for g in _groups_in(each)):
        for sharded in group.parameters:
            of_sharded = sharded.layout.ranks
            groups += [of_sharded.shard_group, of_sharded.replicate_group]
    return [g for g in dict.fromkeys(groups) if g is not None and g.size() > 1]


def _agree_on_root(
    modules: Sequence[nn.Module], failure: Exception | None, groups: Sequence[dist.ProcessGroup]
) -> int:
    """The number of the sharded model, free on all ranks: one may have collected a deleted model
    that another has not. Collective.

    Raises:
        Zero3Error: another rank has a ``failure``; this rank's own is raised as it is.
    """
    inner = {g.model.number for each in modules for g in _groups_in(each) if g.model}
    in_use = _C.live_roots() - inner
    me = dist.get_rank()
    failures = {} if failure is None else {me: f"{type(failure).__name__}: {failure}"}
    try:
        for group in groups:
            mine = [sorted(in_use), list(failures.items())]
            for theirs, of_rank in agree.gather("fully_shard: outcome", mine, group):
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


def _layout_of(
    fqn: str,
    parameter: nn.Parameter,
    ranks: DataParallel,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
) -> Layout:
    if not (shard_placement_fn is None or callable(shard_placement_fn)):
        raise TypeError(
            "shard_placement_fn is a function of a parameter that gives a Shard or None, got "
            f"{shard_placement_fn!r}"
        )
    placement = None if shard_placement_fn is None else shard_placement_fn(parameter)
    if placement is None:
        placement = Shard(0)
    if not isinstance(placement, Shard):
        is_known = type(placement).__name__ == "ShardPlacementResult"
        raise (NotImplementedError if is_known else TypeError)(
            f"shard_placement_fn gave {placement!r} for '{fqn}'; it gives a Shard or None"
            + (". A mesh for each parameter is not supported yet" if is_known else "")
        )
    dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
    if dim not in range(parameter.dim()):
        raise ValueError(
            f"shard_placement_fn gave {placement!r} for '{fqn}', which has {parameter.dim()} "
            "dimensions, counted from 0"
        )
    if parameter.shape[dim] == 0:
        raise Zero3Error(f"'{fqn}' has shape {tuple(parameter.shape)}: there is nothing to shard")
    if not isinstance(parameter, DTensor):
        return Layout.of(parameter, ranks, dim)
    if any(p.is_partial() for p in parameter.placements):
        raise Zero3Error(
            f"'{fqn}' is a DTensor by {parameter.placements}: redistribute it to Shard or Replicate"
        )
    try:
        return Layout.of(parameter, ranks, dim)
    except RuntimeError as error:
        raise Zero3Error(
            f"'{fqn}' is a DTensor over {parameter.device_mesh}, which cannot be sharded over "
            f"{ranks.mesh} too ({error}): pass mesh= of the other dimension of one mesh, such as "
            'mesh["dp"] of init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        ) from error


def _settle_ownership(modules: list[nn.Module], group: ParameterGroup, root: int) -> None:
    """Makes ``modules`` the outermost sharded ones of all that is in them, and names them so."""
    whole = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    groups = _groups_in(whole)
    parameters = [parameter for g in groups for parameter in g.parameters]
    for child in groups:
        if child is not group and child.parent is None:
            child.parent = group

    # The first sharded model of a process has plain names; those of a second one begin with its
    # class and number. Numbers follow the order of the fully_shard calls; that of a
    # deleted model is free again.
    label = "" if root == 1 else f"{original_class(modules[0]).__name__}:{root}."
    names = {id(tensor): fqn for fqn, tensor in whole.named_parameters()}
    model = ShardedModel(root, parameters)
    for child in groups:
        child.model = model
    first: dict[str, int] = {}  # a number of the model for each group, not by who is alive
    for parameter in parameters:
        handle = parameter.handle
        name = names.get(id(parameter.shard))  # None: its module was deleted
        parameter.join(model, parameter.fqn if name is None else label + name)
        handle.model = first.setdefault(handle.group_name, handle.copy_number)


def _unsharded_modules(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """``named_modules()``, each once, without those in blocks that are sharded already."""
    result: dict[nn.Module, str] = {}
    sharded: set[nn.Module] = set()
    for name, submodule in itertools.chain(*(module.named_modules() for module in modules)):
        if submodule in sharded:
            continue
        if isinstance(submodule, Zero3Module):
            sharded.update(cast(nn.Module, submodule).modules())
        else:
            result.setdefault(submodule, name)
    return [(name, submodule) for submodule, name in result.items()]


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise Zero3Error(
            "fully_shard needs a process group: call torch.distributed.init_process_group() first "
            "(under torchrun), or pass mesh="
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def _refuse_unsupported(
    mesh: DeviceMesh, offload_policy: OffloadPolicy, dp_mesh_dims: object
) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a DeviceMesh, got {mesh!r}; init_device_mesh makes one, and "
            "DeviceMesh.from_group of a process group"
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a mesh of one or two dimensions, got {mesh}: slice those that "
            'compute on different data out of it, mesh["replicate", "shard"]'
        )
    offloads = type(offload_policy) is not OffloadPolicy
    unsupported = {
        f"offload_policy={offload_policy!r} on {mesh.device_type!r}": offloads
        and not (isinstance(offload_policy, CPUOffloadPolicy) and mesh.device_type == "cpu"),
        "dp_mesh_dims": dp_mesh_dims is not None,
    }
    for what, asked in unsupported.items():
        if asked:
            raise NotImplementedError(f"fully_shard does not support {what} yet")


def _resolve_reshard(
    reshard_after_forward: bool | int | None, ranks: DataParallel
) -> tuple[bool | None, int | None]:
    """Whether forwards free what they gathered, and over how many ranks they shard it then, if not
    over all or none.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, None
    world_size = ranks.shard_group.size()
    if not isinstance(reshard_after_forward, int) or (
        reshard_after_forward < 1 or world_size % reshard_after_forward
    ):
        raise ValueError(
            "reshard_after_forward is True, False, None or a divisor of the number of ranks that "
            f"have shards, {world_size}; got {reshard_after_forward!r}"
        )
    if reshard_after_forward in (1, world_size):
        return reshard_after_forward > 1, None
    return True, reshard_after_forward


def _check_policy(policy: MixedPrecisionPolicy) -> None:
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy is a torch.distributed.fsdp.MixedPrecisionPolicy, got {policy!r}; without "
            "the argument nothing is cast"
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype not in (None, *grad_dtype.DTYPES):
            raise ValueError(
                f"{name} of mp_policy is {dtype!r}; it is None or one of "
                f"{', '.join(map(str, grad_dtype.DTYPES))}"
            )


def _policy_for(
    fqn: str, parameter: nn.Parameter, policy: MixedPrecisionPolicy
) -> MixedPrecisionPolicy:
    """``policy`` with the ``param_dtype`` of ``parameter``: from torch 2.15 on, a policy may have a
    ``param_dtype_override_fn``.
    """
    override = getattr(policy, "param_dtype_override_fn", None)
    dtype = None if override is None else override(parameter)
    if dtype is None:
        return policy
    if dtype not in (policy.param_dtype, parameter.dtype):
        raise ValueError(
            f"param_dtype_override_fn of mp_policy gave {dtype!r} for '{fqn}'; it gives None, the "
            f"policy's param_dtype, {policy.param_dtype}, or the parameter's own, {parameter.dtype}"
        )
    return dataclasses.replace(policy, param_dtype=dtype)


def _ignored(parameters: Iterable[nn.Parameter] | None) -> set[nn.Parameter]:
    ignored = set() if parameters is None else set(parameters)
    for each in ignored:
        if not isinstance(each, nn.Parameter):
            raise TypeError(f"ignored_params is a set of nn.Parameters, got one with {each!r}")
    return ignored


def _check_module(module: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raises unless ``module`` can be sharded."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes an nn.Module, got {type(module).__name__}")
    kind = type(module).__name__
    if isinstance(module, Zero3Module):
        raise Zero3Error(f"fully_shard was called twice on the same {kind}")
    if getattr(module.forward, "__name__", "") == "_forward_unimplemented":
        raise Zero3Error(
            f"a {kind} has no forward, so nothing would say when its parameters are needed: call "
            "fully_shard on the modules in it instead"
        )
    for submodule in module.modules():
        if isinstance(submodule, Zero3Module):
            for sharded in submodule._zero3_group.parameters:
                _ = sharded.shard  # raises if it was replaced
    for prefix, submodule in _unsharded_modules([module]):
        where = f"'{prefix}' ({type(submodule).__name__})" if prefix else f"the {kind}"
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
            raise Zero3Error(
                f"the parameters of {where} were sharded already, with an enclosing module: call "
                "fully_shard on the blocks first and on the model last"
            )
        own = {n: p for n, p in submodule._parameters.items() if p is not None and p not in ignored}
        for attribute, parameter in own.items():
            _check_parameter(f"{prefix}.{attribute}".lstrip("."), parameter)
        _check_private_references(where, submodule, own)


def _check_parameter(fqn: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise Zero3Error(f"'{fqn}' has no shape yet: run the lazy module once before fully_shard")
    local = torch_internals.local_tensor(parameter) if isinstance(parameter, DTensor) else parameter
    if torch_internals.is_wrapper(local):
        raise NotImplementedError(
            f"'{fqn}' is a {type(local).__name__}, a tensor subclass, and fully_shard does not "
            "support them yet: pass it in ignored_params"
        )
    if parameter.dim() == 0:
        raise Zero3Error(
            f"'{fqn}' is a scalar, which has no rows to shard: make it a 1-D tensor of one "
            "element, or pass it in ignored_params"
        )
    if parameter.is_complex():
        raise Zero3Error(
            f"'{fqn}' is {parameter.dtype}, which cannot be communicated: keep it as a "
            "real tensor, torch.view_as_real, or pass it in ignored_params"
        )
    if parameter.layout != torch.strided:
        raise Zero3Error(f"'{fqn}' is {parameter.layout}; only dense parameters can be sharded")
    grad_dtype.check(fqn, parameter)


def _check_private_references(where: str, module: nn.Module, own: dict[str, nn.Parameter]) -> None:
    """A weight that the module also keeps elsewhere would stay whole there, and go stale."""
    names = {id(parameter): attribute for attribute, parameter in own.items()}
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_modules", "_buffers"):
            continue
        values = value.values() if isinstance(value, dict) else value
        for item in values if isinstance(value, list | tuple | dict) else (value,):
            if id(item) in names and isinstance(item, nn.Parameter):
                raise Zero3Error(
                    f"{where} keeps a second reference to its parameter '{names[id(item)]}' in "
                    f"'{attribute}', which would go stale: read self.{names[id(item)]} in forward "
                    "instead, or pass the module's parameters in ignored_params"
                )
