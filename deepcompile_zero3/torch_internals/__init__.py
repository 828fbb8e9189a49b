"""Private names of torch that training uses.

``compiler`` has those of torch.compile, ``stored_graphs`` those of its caches, ``dynamo_trace``
what forwards ask Dynamo while it traces them, and ``dynamo_runs`` what it has compiled.
"""

import contextlib
import datetime
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor

from deepcompile_zero3.torch_release import private

_F = TypeVar("_F", bound=Callable)

# Returns the device of the tensors through which a group's ranks exchange values.
device_of_objects: Callable[[Any], Any] = private(
    "torch.distributed.distributed_c10d", "_get_object_coll_device"
)
_new_process_group_helper: Callable = private(
    "torch.distributed.distributed_c10d", "_new_process_group_helper"
)
_get_default_timeout: Callable = private(
    "torch.distributed.distributed_c10d", "_get_default_timeout"
)
# Sets how long ranks of a group wait for each other, from the next collective on.
set_timeout: Callable[[datetime.timedelta, dist.ProcessGroup], None] = private(
    "torch.distributed.distributed_c10d", "_set_pg_timeout"
)
_get_default_store: Callable = private("torch.distributed.distributed_c10d", "_get_default_store")
_c10d: Any = private("torch.distributed", "distributed_c10d")

# Like torch.compiler.disable, but imports Dynamo, which takes a second, only when the returned
# function is first called: in the first forward.
disable_dynamo: Callable[[_F], _F] = private("torch._compile", "_disable_dynamo")
# The parts of Dynamo's skip_code.
_set_strategy: Callable[..., None] = private(
    "torch._C", "_dynamo.eval_frame.set_code_exec_strategy"
)
_FrameExecStrategy: Any = private("torch._C", "_dynamo.eval_frame._FrameExecStrategy")
_FrameAction: Any = private("torch._C", "_dynamo.eval_frame._FrameAction")
_DTensorSpec = private("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
_TensorMeta = private("torch.distributed.tensor._dtensor_spec", "TensorMeta")
_concatenate_meshes: Callable = private("torch.distributed.device_mesh", "DeviceMesh._concatenate")
# Placement of a tensor that is sharded over one mesh dimension, and each shard over another.
StridedShard: Any = private("torch.distributed.tensor.placement_types", "_StridedShard")
# Whether a tensor stands for others in a transform of torch.func, and has no storage.
is_transformed: Callable[[torch.Tensor], bool] = private(
    "torch._C._functorch", "is_functorch_wrapped_tensor"
)
_functorch_stack = private("torch._C._functorch", "get_interpreter_stack")
_without_functorch = private("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack")
# Whether a tensor is a wrapper subclass, made of other tensors.
is_wrapper: Callable[[object], bool] = private(
    "torch.utils._python_dispatch", "is_traceable_wrapper_subclass"
)
# A context in which no ``__torch_function__`` of a class of tensors is called.
WithoutTorchFunction: Any = private("torch._C", "DisableTorchFunctionSubclass")
# Attribute of an ``nn.RNNBase``: a list of its weights.
FLAT_WEIGHTS = "_flat_weights"
# Operators, as the targets of graph nodes.
HigherOrderOperator: Any = private("torch._ops", "HigherOrderOperator")
OpOverload: Any = private("torch._ops", "OpOverload")
OpOverloadPacket: Any = private("torch._ops", "OpOverloadPacket")
# Trees of tuples, lists and dicts.
tree_flatten: Callable[..., Any] = private("torch.utils._pytree", "tree_flatten")
tree_leaves: Callable[[Any], list[Any]] = private("torch.utils._pytree", "tree_leaves")
tree_map_only: Callable[..., Any] = private("torch.utils._pytree", "tree_map_only")
tree_unflatten: Callable[..., Any] = private("torch.utils._pytree", "tree_unflatten")
# Where a module keeps the states of torch's composable APIs, by the function that made each.
_STATE_KEY: str = private("torch.distributed._composable.contract", "STATE_KEY")
_fully_shard: Callable = private("torch.distributed.fsdp", "fully_shard.__wrapped__")
# Id of the hooks around a sharded module's forward. torch's own ids count from zero.
_FORWARD_HOOK = -1
_nn_module: Any = private("torch.nn.modules", "module")
_top_saved_tensors_hooks = private("torch._C._autograd", "_top_saved_tensors_default_hooks")
_why_no_saved_tensors_hooks: Callable[[], str | None] = private(
    "torch._C._autograd", "_saved_tensors_hooks_get_disabled_error_message"
)
_engine_run_backward: Any = private("torch.autograd.graph", "_engine_run_backward")
# The methods by which autograd calls the ``backward`` of a ``torch.autograd.Function``.
_APPLY = {
    method.__code__
    for name, method in vars(torch.autograd.function.BackwardCFunction).items()
    if name in ("apply", "apply_boxed")
}
_will_execute: Callable[[Any], bool] = private("torch._C", "_will_engine_execute_node")


def new_process_group(
    name: str, ranks: list[int], like: dist.ProcessGroup, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Creates a group of these ranks of the job, with the backend of ``like``. Only they call this.

    ``dist.new_group(use_local_synchronization=True)`` would name it by the number of groups that a
    rank is in. If some groups have been destroyed, that name may belong to another group, or differ
    between ranks.
    """
    backends = dist.get_backend_config(like)
    options = None
    if "nccl" in dist.BackendConfig(dist.Backend(backends)).device_backend_map.values():
        # NCCL's kernels go before those of the computation that is to hide them.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    device = _c10d._get_default_group().bound_device_id
    group, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backends),
        _get_default_store(),
        name,
        backend_options=options,
        timeout=timeout,
        device_id=device if device is not None and device.type in backends else None,
        group_desc=f"zero3: {name}",
    )
    _c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def default_timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """Returns how long ranks of such a group wait if nobody has said."""
    return _get_default_timeout(dist.Backend(dist.get_backend(group)))


def group_names() -> set[str]:
    """Returns the names of the process groups that this rank is in."""
    return {*_c10d._world.pg_names.values()}


def new_fake_store() -> Any:
    """Returns a store for a process group of the backend "fake", which sends nothing."""
    return private("torch.testing._internal.distributed.fake_pg", "FakeStore")()


def assume_constant_result(function: _F) -> _F:
    """Does the same as ``torch.compiler.assume_constant_result``, without importing Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def inline_only(function: _F) -> _F:
    """Lets Dynamo trace ``function`` inside a traced frame, but never compile it alone.

    If eager code calls the function, between two graphs for example, it runs in eager and
    ``torch.compiler.is_compiling()`` is False in it.
    """
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    _set_strategy(function.__code__, strategy)
    return function


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and value of each buffer of ``module`` itself that is in state dicts."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def is_checkpointed() -> bool:
    """Returns whether non-reentrant ``torch.utils.checkpoint`` packs what autograd saves now.

    It does so in a forward, and when it computes the same again.
    """
    hooks = outer_saved_tensors_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def is_in_custom_backward() -> bool:
    """Returns whether the caller is in the ``backward`` of a ``torch.autograd.Function``.

    Hooks are not, nor is what a backward runs that was started in it. The backward of a compiled
    graph, which is such a function, runs no code of users but hooks.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        if frame.f_code in _APPLY:
            function = type(frame.f_locals["self"])._forward_cls
            return not function.__module__.startswith("torch._functorch.")
        frame = frame.f_back
    return False


def outer_saved_tensors_hooks() -> tuple[Callable, Callable] | None:
    """Returns the (pack, unpack) pair that autograd would use now, or None."""
    return _top_saved_tensors_hooks(False)


def may_pack_saved_tensors() -> bool:
    """Returns whether hooks on saved tensors are allowed, and tensors may be saved, here."""
    is_allowed = _why_no_saved_tensors_hooks() is None and not is_in_transform()
    return is_allowed and torch.is_grad_enabled()


def backward_reaches(leaf: torch.Tensor) -> bool:
    """Returns whether the running backward, with ``create_graph``, accumulates into ``leaf``."""
    view = leaf.view_as(leaf)
    return view.grad_fn is not None and _will_execute(view.grad_fn.next_functions[0][0])


def is_in_transform() -> bool:
    """Returns whether a transform of ``torch.func`` is running."""
    return bool(_functorch_stack())


def is_differentiated_by_transform() -> bool:
    """Returns whether a transform of ``torch.func`` that runs computes derivatives."""
    return any(each.key().name in ("Grad", "Jvp") for each in _functorch_stack() or ())


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Makes results of the context constants for the ``torch.func`` transforms that run."""
    return _without_functorch()


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Returns the local tensor itself; ``to_local()`` would return a new, differentiable view."""
    return tensor._local_tensor


def local_gradient(parameter: DTensor) -> torch.Tensor | None:
    """Returns the local tensor of the gradient of ``parameter``, by the parameter's placements.

    Collective if the gradient has other placements, such as partial sums.
    """
    gradient: Any = parameter.grad
    if gradient is None:
        return None
    spec = parameter._spec
    placements = gradient._spec.placements
    if placements is not spec.placements and placements != spec.placements:
        gradient = gradient.redistribute(spec.mesh, spec.placements)
    return local_tensor(gradient)


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often ``tensor`` was written to, or 0 where torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def spec_of(tensor: DTensor) -> Any:
    """Returns the mesh, placements, shape, stride and dtype of ``tensor``."""
    return tensor._spec


def with_spec(local: torch.Tensor, spec: Any) -> DTensor:
    """Returns the DTensor of this local tensor. Not differentiable."""
    # Without __init__, which serves torch.export, in wrappers that take longer than the rest.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def init_mesh(
    mesh: DeviceMesh,
    device_type: str,
    ranks: torch.Tensor,
    names: tuple[str, ...],
    groups: list[dist.ProcessGroup],
) -> None:
    """Calls the constructor of ``mesh``, and gives it ``groups`` in place of new ones.

    Args:
        groups: the process group of each dimension, or none if this rank is not in the mesh.
    """
    DeviceMesh.__init__(mesh, device_type, ranks, mesh_dim_names=names, _init_backend=False)
    mesh._dim_group_names = [group.group_name for group in groups]  # type: ignore[attr-defined]


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Returns one mesh with the dimensions of ``meshes``, which are named slices of one mesh.

    Raises:
        RuntimeError: they are not.
    """
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise RuntimeError("a mesh has no mesh_dim_names")
    try:
        return _concatenate_meshes(meshes)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from error


def placement_on_mesh(result: Any) -> tuple[Any, DeviceMesh, tuple[int | None, int | None]] | None:
    """Returns the parts of a ``ShardPlacementResult`` of torch's FSDP2, or None for other objects.

    Returns:
        The placement or None, the mesh, and its dimensions that replicate and that shard.
    """
    if type(result).__name__ != "ShardPlacementResult":  # torch has it from 2.13 on
        return None
    info = result.mesh_info
    return result.placement, info.mesh, (info.replicate_mesh_dim, info.shard_mesh_dim)


def flat_submesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Returns the slice of ``mesh`` with ``names``, which come in its order, as one dimension."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def dtensor_like(local: torch.Tensor, like: DTensor, full: torch.Tensor | None = None) -> DTensor:
    """Returns a DTensor of the shape and placements of ``like`` whose local tensor is ``local``.

    Both share one spec if the dtype is the same: torch replaces specs and does not change them.

    Args:
        local: the local tensor.
        like: a DTensor.
        full: has the shape and strides, in place of ``like``. It may be on the meta device.
    """
    spec = like._spec
    meta: Any = spec.tensor_meta
    if full is not None or local.dtype != meta.dtype:
        shape, stride = (meta.shape, meta.stride) if full is None else (full.shape, full.stride())
        meta = _TensorMeta(shape, stride, local.dtype)
        spec = _DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return with_spec(local, spec)


def post_accumulate_grad_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Returns the hooks of ``register_post_accumulate_grad_hook``, in order of registration."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def register_forward_hooks(module: nn.Module, pre_hook: Callable, hook: Callable) -> None:
    """Registers the first pre-hook of a module's forward, and a hook that always follows it.

    Dynamo guards on the ids of hooks. torch gives each hook an id of its own, with which equal
    blocks would share no compilation; these have one id in all modules.
    """
    # Dynamo of torch 2.11 reads the keys by dict.keys, which does not see what move_to_end did.
    others = dict(module._forward_pre_hooks)
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks.update({_FORWARD_HOOK: pre_hook} | others)
    module._forward_pre_hooks_with_kwargs[_FORWARD_HOOK] = True
    module._forward_hooks[_FORWARD_HOOK] = hook
    module._forward_hooks_always_called[_FORWARD_HOOK] = True


def has_hooks_of_others(module: Any) -> bool:
    """Returns whether a module has hooks besides those of ``register_forward_hooks``."""
    # len(), since Dynamo does not guard on whether an OrderedDict is empty.
    return (
        list(module._forward_pre_hooks) != [_FORWARD_HOOK]
        or list(module._forward_hooks) != [_FORWARD_HOOK]
        or len(module._backward_pre_hooks) > 0
        or len(module._backward_hooks) > 0
        or len(_nn_module._global_forward_pre_hooks) > 0
        or len(_nn_module._global_forward_hooks) > 0
        or len(_nn_module._global_backward_pre_hooks) > 0
        or len(_nn_module._global_backward_hooks) > 0
    )


def set_fsdp_state(module: nn.Module, state: object) -> None:
    """Makes ``state`` what torch's ``fully_shard.state(module)`` returns.

    torch's ``fully_shard`` refuses a module that has one.
    """
    module.__dict__.setdefault(_STATE_KEY, {})[_fully_shard] = state


def fsdp_state_of(module: nn.Module) -> Any:
    """Returns the state that ``set_fsdp_state`` has stored."""
    return module.__dict__[_STATE_KEY][_fully_shard]


def storage_address(tensor: torch.Tensor) -> int:
    """Returns the address of the storage of ``tensor``, which all of its views share."""
    return tensor.untyped_storage()._cdata


def schema_of(op: Any) -> Any:
    """Returns the schema of an ``OpOverload``: its arguments and results, and what it writes to."""
    return op._schema


def has_grad_dtype(tensor: torch.Tensor) -> bool:
    """Returns whether somebody has set ``tensor.grad_dtype``.

    Before torch 2.15, one that equals the dtype of ``tensor`` cannot be told from the default.
    """
    return getattr(tensor, "_has_grad_dtype_override", tensor.grad_dtype != tensor.dtype)
