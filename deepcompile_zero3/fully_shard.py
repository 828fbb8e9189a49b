"""``fully_shard``: what the user calls, what it refuses, and how names are settled."""

import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import grad_dtype, one_host
from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.group import ParameterGroup
from deepcompile_zero3.module import Zero3Module, original_class, parameters_of, swap_class
from deepcompile_zero3.parameter import ShardedParameter, full_like
from deepcompile_zero3.runtime import _C

# Set on a parameter that was sharded, for the modules that are tied to it and come later.
_SHARDED_AS = "_zero3_sharded_as"


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    transport: one_host.Transport = "auto",
) -> nn.Module:
    """Shards the parameters of ``module`` over the ranks of ``mesh``, in place.

    Call it on the blocks of a model, then on the model: each call makes one group of the
    parameters that no earlier call took, and eager code gathers a group at a time. Afterwards

    * ``module.parameters()`` are DTensors, ``Shard(0)`` in the layout of ``torch.chunk``, in their
      original dtype. Give them to the optimizer.
    * In a forward, ``module.weight`` is the full tensor in ``mp_policy.param_dtype``, whether the
      forward runs in eager or under ``torch.compile`` with any backend. Outside, it is the DTensor.
    * After ``backward()``, ``parameter.grad`` is a DTensor of the same placement: the mean over
      the ranks.

    It has the signature, but for ``transport``, and the meaning of
    :func:`torch.distributed.fsdp.fully_shard`; see
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. It is collective: all
    ranks of the mesh call it, in one order.

    Args:
        module: the block or model. Ranks must hold the same values.
        mesh: 1-D. By default all ranks of the job, on the accelerator if there is one, else on
            the CPU.
        reshard_after_forward: True: backward gathers again. False: what forward gathered is kept
            for backward. None: the compiler chooses within its option ``keep_mb``; eager code
            gathers again. Where ranks share memory, only True bounds what gathered parameters
            take; otherwise the host holds one copy of each.
        shard_placement_fn: not supported yet.
        mp_policy: dtypes of computation (``param_dtype``), of gradients on the wire
            (``reduce_dtype``) and of the forward's outputs (``output_dtype``).
        offload_policy: not supported yet.
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
    _refuse_unsupported(
        module, mesh, reshard_after_forward, shard_placement_fn, offload_policy, dp_mesh_dims
    )
    _check_policy(mp_policy)
    mesh = _default_mesh() if mesh is None else mesh
    ignored = ignored_params or set()
    transport = one_host.resolve(transport)
    _check_module(module, ignored)
    new = _new_parameters(module, ignored)
    fulls = [full_like(parameter, mp_policy) for parameter in new]
    parts = one_host.share(
        fulls, mesh.get_group(), mesh.device_type, transport, take_turns=bool(reshard_after_forward)
    )
    shared = dict(zip(new, parts, strict=True)) if parts else {}

    owned: list[ShardedParameter] = []
    for _, submodule in _unsharded_modules(module):
        sharded: dict[str, ShardedParameter] = dict(parameters_of(submodule))
        for attribute, parameter in list(submodule._parameters.items()):
            if parameter is None or parameter in ignored or attribute in sharded:
                continue
            known = getattr(parameter, _SHARDED_AS, None)
            if known is None:
                known = ShardedParameter(
                    parameter,
                    submodule,
                    attribute,
                    mesh,
                    mp_policy,
                    cast(bool | None, reshard_after_forward),
                    shared.get(parameter),
                )
                setattr(parameter, _SHARDED_AS, known)
                owned.append(known)
            else:
                submodule._parameters[attribute] = cast(nn.Parameter, known.shard)
            sharded[attribute] = known
        if sharded:
            submodule.__dict__["_zero3_parameters"] = sharded
            if submodule is not module:
                swap_class(submodule)

    group = ParameterGroup(owned, mp_policy)
    swap_class(module, group)
    module.register_forward_pre_hook(group.pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(group.post_forward, always_call=True)
    _settle_ownership(module, group)
    return module


def _new_parameters(module: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    """Those that no earlier call took, each once."""
    return [
        parameter
        for parameter in dict.fromkeys(
            parameter
            for _, submodule in _unsharded_modules(module)
            for parameter in submodule._parameters.values()
            if parameter is not None and parameter not in ignored
        )
        if not hasattr(parameter, _SHARDED_AS) and not isinstance(parameter, DTensor)
    ]


def _settle_ownership(module: nn.Module, group: ParameterGroup) -> None:
    """Makes ``module`` the outermost sharded module of all that is in it, and names them by it."""
    groups = [m._zero3_group for m in module.modules() if isinstance(m, Zero3Module)]
    parameters = [parameter for g in groups for parameter in g.parameters]
    for child in groups:
        if child is not group and child.parent is None:
            child.parent = group
    for parameter in parameters:
        parameter.forget_name()

    # The first sharded model of a process has plain names; those of a second one begin with its
    # class and number. Numbers follow the order of the fully_shard calls; that of a
    # deleted model is free again.
    in_use = _C.live_roots()
    root = next(number for number in itertools.count(1) if number not in in_use)
    label = "" if root == 1 else f"{original_class(module).__name__}:{root}."
    names = {id(tensor): fqn for fqn, tensor in module.named_parameters()}
    for child in groups:
        child.root = root
    for parameter in parameters:
        parameter.rename(label + names[id(parameter.shard)], root)


def _unsharded_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """``named_modules()`` without those in blocks that are sharded already."""
    result: list[tuple[str, nn.Module]] = []
    sharded: set[nn.Module] = set()
    for name, submodule in module.named_modules():
        if submodule in sharded:
            continue
        if isinstance(submodule, Zero3Module):
            sharded.update(cast(nn.Module, submodule).modules())
        else:
            result.append((name, submodule))
    return result


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise Zero3Error(
            "fully_shard needs a process group: call torch.distributed.init_process_group() first "
            "(under torchrun), or pass mesh="
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def _refuse_unsupported(
    module: object,
    mesh: DeviceMesh | None,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: object,
    offload_policy: OffloadPolicy,
    dp_mesh_dims: object,
) -> None:
    unsupported = {
        "a list of modules": isinstance(module, list | tuple),
        "a mesh of more than one dimension": mesh is not None and mesh.ndim != 1,
        f"reshard_after_forward={reshard_after_forward!r}": (
            isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)
        ),
        "shard_placement_fn": shard_placement_fn is not None,
        type(offload_policy).__name__: type(offload_policy) is not OffloadPolicy,
        "dp_mesh_dims": dp_mesh_dims is not None,
    }
    for what, asked in unsupported.items():
        if asked:
            raise NotImplementedError(f"fully_shard does not support {what} yet")
    if reshard_after_forward not in (True, False, None):
        raise ValueError(
            f"reshard_after_forward is True, False or None, got {reshard_after_forward!r}"
        )


def _check_policy(policy: MixedPrecisionPolicy) -> None:
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(
            "mp_policy is a torch.distributed.fsdp.MixedPrecisionPolicy, got a "
            f"{type(policy).__name__}"
        )
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, name)
        if dtype not in (None, *grad_dtype.DTYPES):
            raise ValueError(
                f"{name} of mp_policy is {dtype!r}; it is None or one of "
                f"{', '.join(map(str, grad_dtype.DTYPES))}"
            )


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
    for prefix, submodule in _unsharded_modules(module):
        where = f"'{prefix}' ({type(submodule).__name__})" if prefix else f"the {kind}"
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
    if isinstance(parameter, DTensor):
        raise NotImplementedError(
            f"'{fqn}' is a DTensor already ({parameter.placements}); composing with other "
            "shardings is not supported yet"
        )
    if parameter.dim() == 0:
        raise Zero3Error(
            f"'{fqn}' is a scalar, which has no rows to shard: make it a 1-D tensor of one "
            "element, or pass it in ignored_params"
        )
    if parameter.shape[0] == 0:
        raise Zero3Error(f"'{fqn}' has shape {tuple(parameter.shape)}: there is nothing to shard")
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
