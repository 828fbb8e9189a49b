"""Every touch of torch's private API, in one place: here, and of its compiler in ``compiler``."""

import contextlib
import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

from deepcompile_zero3.torch_release import private

# A process group by the name that the runtime knows it by.
resolve_process_group: Callable[[str], Any] = private(
    "torch.distributed.distributed_c10d", "_resolve_process_group"
)

# Where the tensors have to be by which a group's ranks tell each other values.
device_of_objects: Callable[[Any], Any] = private(
    "torch.distributed.distributed_c10d", "_get_object_coll_device"
)
_new_process_group_helper: Callable = private(
    "torch.distributed.distributed_c10d", "_new_process_group_helper"
)
_get_default_store: Callable = private("torch.distributed.distributed_c10d", "_get_default_store")
_c10d: Any = private("torch.distributed", "distributed_c10d")

# As torch.compiler.disable, but it imports Dynamo, which takes a second, when what it returned is
# first called: in the first forward.
disable_dynamo: Callable[[Callable], Callable] = private("torch._compile", "_disable_dynamo")
# What Dynamo's skip_code is made of.
_set_strategy: Callable[..., None] = private(
    "torch._C", "_dynamo.eval_frame.set_code_exec_strategy"
)
_FrameExecStrategy: Any = private("torch._C", "_dynamo.eval_frame._FrameExecStrategy")
_FrameAction: Any = private("torch._C", "_dynamo.eval_frame._FrameAction")
_DTensorSpec = private("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
_TensorMeta = private("torch.distributed.tensor._dtensor_spec", "TensorMeta")
_concatenate_meshes: Callable = private("torch.distributed.device_mesh", "DeviceMesh._concatenate")
# Of a tensor that is sharded over one dimension of a mesh, and each shard over another.
StridedShard: Any = private("torch.distributed.tensor.placement_types", "_StridedShard")
_peek_functorch = private("torch._C._functorch", "peek_interpreter_stack")
_without_functorch = private("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack")
# Whether a tensor is made of others, and only looks like one.
is_wrapper: Callable[[object], bool] = private(
    "torch.utils._python_dispatch", "is_traceable_wrapper_subclass"
)
_top_saved_tensors_hooks = private("torch._C._autograd", "_top_saved_tensors_default_hooks")


def new_process_group(
    name: str, ranks: list[int], like: dist.ProcessGroup, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """A group of these ranks of the job, with the backend of ``like``. Only they call this.

    ``dist.new_group(use_local_synchronization=True)`` would name it by the number of groups that a
    rank is in, which is another's name when some have been destroyed, or not that of the others.
    """
    backends = dist.get_backend_config(like)
    options = None
    if "nccl" in dist.BackendConfig(dist.Backend(backends)).device_backend_map.values():
        # Its kernels go before those of the computation that they are to be hidden behind.
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


def new_fake_store() -> Any:
    """For a process group of the backend "fake", which sends nothing."""
    return private("torch.testing._internal.distributed.fake_pg", "FakeStore")()


def assume_constant_result(function: Callable) -> Callable:
    """As ``torch.compiler.assume_constant_result``, which imports Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def inline_only(function: Callable) -> Callable:
    """Lets Dynamo trace ``function`` where it is called from a traced frame, but never compile it
    alone: called from eager code, between two graphs say, it runs for real, and finds
    ``torch.compiler.is_compiling()`` false.
    """
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    _set_strategy(function.__code__, strategy)
    return function


def is_checkpointed() -> bool:
    """Whether ``torch.utils.checkpoint``, not reentrant, takes what autograd saves now."""
    hooks = outer_saved_tensors_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def outer_saved_tensors_hooks() -> tuple[Callable, Callable] | None:
    """The (pack, unpack) pair that autograd would use now, if there is one."""
    return _top_saved_tensors_hooks(False)


def is_in_transform() -> bool:
    """Whether a transform of ``torch.func`` is running."""
    return _peek_functorch() is not None


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """What is computed in it is a constant to the transforms of ``torch.func`` that are running."""
    return _without_functorch()


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The very tensor behind ``tensor``: ``to_local()`` would give a new, differentiable view."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """Its mesh, placements, shape, stride and dtype."""
    return tensor._spec


def with_spec(local: torch.Tensor, spec: Any) -> DTensor:
    """The DTensor of this local tensor, not differentiable."""
    return DTensor(local, spec, requires_grad=False)


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh of the dimensions of several, which are named slices of one mesh.

    Raises:
        RuntimeError: they are not.
    """
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise RuntimeError("a mesh has no mesh_dim_names")
    try:
        return _concatenate_meshes(meshes)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from error


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """``local`` as this rank's part of a tensor of the shape and placement of ``like``."""
    spec = like._spec
    meta = _TensorMeta(like.shape, like.stride(), local.dtype)
    return with_spec(local, _DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta))


def post_accumulate_grad_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """The hooks of ``register_post_accumulate_grad_hook``, in order of registration."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def storage_address(tensor: torch.Tensor) -> int:
    """Which storage ``tensor`` lives in: the same for all of its views."""
    return tensor.untyped_storage()._cdata
