"""Every touch of torch's private API, in one place.

Tried with the releases in ``TRIED``. An untried torch warns once; a missing piece raises with its
name, so that a new torch fails here and not in the middle of a training step.
"""

import contextlib
import datetime
import importlib
import inspect
import operator
import pathlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

TRIED = ("2.11", "2.13", "2.15")


def _release() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if ".".join(map(str, _release())) not in TRIED:
    warnings.warn(
        f"deepcompile_zero3 was tried with torch {', '.join(TRIED)}, not with {torch.__version__}",
        stacklevel=2,
    )


def _private(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"deepcompile_zero3 needs {module}.{name}, which torch {torch.__version__} does not "
            f"have. Install one of the releases it was tried with: {', '.join(TRIED)}"
        ) from error


# The compiler: Inductor's own pipeline, which hands the partitioned graphs to a function of ours.
compile_fx: Callable[..., Callable] = _private("torch._inductor.compile_fx", "compile_fx")
compile_fx_inner: Callable[..., Callable] = _private(
    "torch._inductor.compile_fx", "compile_fx_inner"
)
aot_autograd: Callable[..., Callable] = _private("torch._dynamo.backends.common", "aot_autograd")
make_boxed_func: Callable[..., Callable] = _private("functorch.compile", "make_boxed_func")
min_cut_rematerialization_partition: Callable = _private(
    "functorch.compile", "min_cut_rematerialization_partition"
)

# What AOTAutograd says that an input or output of a partitioned graph is.
PlainAOTInput: Any = _private("torch._functorch._aot_autograd.descriptors", "PlainAOTInput")
GradAOTOutput: Any = _private("torch._functorch._aot_autograd.descriptors", "GradAOTOutput")
TangentAOTInput: Any = _private("torch._functorch._aot_autograd.descriptors", "TangentAOTInput")
InputMutationAOTOutput: Any = _private(
    "torch._functorch._aot_autograd.descriptors", "InputMutationAOTOutput"
)
# The outputs of a forward that its backward takes; not every release has the second.
_descriptors = vars(importlib.import_module("torch._functorch._aot_autograd.descriptors"))
SAVED_OUTPUTS: tuple[Any, ...] = tuple(
    _descriptors[name]
    for name in ("SavedForBackwardsAOTOutput", "SavedForBackwardsNoVcCheckAOTOutput")
    if name in _descriptors
)
# How Inductor is given another partitioner: a callable with a key for its cache.
CustomPartitionerFn: Any = _private("torch._inductor.custom_graph_pass", "CustomPartitionerFn")
get_hash_for_files: Callable[..., bytes] = _private(
    "torch._inductor.custom_graph_pass", "get_hash_for_files"
)

# A process group by the name that the runtime knows it by.
resolve_process_group: Callable[[str], Any] = _private(
    "torch.distributed.distributed_c10d", "_resolve_process_group"
)

_new_process_group_helper: Callable = _private(
    "torch.distributed.distributed_c10d", "_new_process_group_helper"
)
_get_default_store: Callable = _private("torch.distributed.distributed_c10d", "_get_default_store")
_c10d: Any = _private("torch.distributed", "distributed_c10d")

# Writes to the folder that TORCH_TRACE names; nothing where it names none.
trace_structured: Callable[..., None] = _private("torch._logging", "trace_structured")

_CompileContext: Any = _private("torch._guards", "CompileContext")
REGION = "Torch-Compiled Region: "  # how the ranges of compiled frames in a profile begin

_reset_code: Callable[..., None] = _private("torch._dynamo.eval_frame", "reset_code")
_skip_code: Callable[..., None] = _private("torch._dynamo.eval_frame", "skip_code")
_counters: Any = _private("torch._dynamo.utils", "counters")
_graph_break_reasons: list[Any] = _private("torch._dynamo.output_graph", "graph_break_reasons")
# Releases before 2.13 may not have it.
_can_isolate = "isolate_recompiles" in inspect.signature(torch.compile).parameters
free_unbacked_symbols: Callable[[Any], set] = _private(
    "torch.fx.experimental.symbolic_shapes", "free_unbacked_symbols"
)
_functorch_config = _private("torch._functorch", "config")
_inductor_config = _private("torch._inductor", "config")
_DTensorSpec = _private("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
_TensorMeta = _private("torch.distributed.tensor._dtensor_spec", "TensorMeta")
_concatenate_meshes: Callable = _private("torch.distributed.device_mesh", "DeviceMesh._concatenate")
# Of a tensor that is sharded over one dimension of a mesh, and each shard over another.
StridedShard: Any = _private("torch.distributed.tensor.placement_types", "_StridedShard")
_peek_functorch = _private("torch._C._functorch", "peek_interpreter_stack")
_without_functorch = _private("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack")
# Whether a tensor is made of others, and only looks like one.
is_wrapper: Callable[[object], bool] = _private(
    "torch.utils._python_dispatch", "is_traceable_wrapper_subclass"
)
_top_saved_tensors_hooks = _private("torch._C._autograd", "_top_saved_tensors_default_hooks")


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


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Of operators, by their packets: what their arguments, and ``out_val``, take."""
    return _private("torch.utils.flop_counter", "flop_registry")


def new_fake_store() -> Any:
    """For a process group of the backend "fake", which sends nothing."""
    return _private("torch.testing._internal.distributed.fake_pg", "FakeStore")()


def custom_partitioner() -> Any:
    """The partitioner that Inductor's own settings name, if they do."""
    return _inductor_config.custom_partitioner_fn


_FOLLOWS = "step_unsupported"  # a frame broke because one that it calls did, which has told why
_BRANCH = "Data-dependent branching"  # as Dynamo calls it in frames that others call


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """Where and why Dynamo breaks graphs while the block runs: "models/gpt.py:310: ...".

    The list is filled when the block ends. A frame that Dynamo gives up whole has no place.
    """
    breaks: list[str] = []
    placed_before, counted_before = len(_graph_break_reasons), Counter(_counters["graph_break"])
    try:
        yield breaks
    finally:
        counted = Counter(_counters["graph_break"]) - counted_before
        placed = [(_place(r.user_stack), r.reason) for r in _graph_break_reasons[placed_before:]]
        explained = {place for place, reason in placed if reason in counted}
        told = {
            f"{place}: {_BRANCH if reason.startswith('generic_jump') else reason}": reason
            for place, reason in placed
            if reason in counted or (place not in explained and reason != _FOLLOWS)
        }
        breaks += [*told, *(reason for reason in counted if reason not in told.values())]


def _place(stack: list[traceback.FrameSummary]) -> str:
    """Of the innermost frame: its file and the folder of that, and the line."""
    if not stack:
        return "somewhere"
    path = pathlib.PurePath(stack[-1].filename)
    return f"{pathlib.PurePath(*path.parts[-2:])}:{stack[-1].lineno}"


def with_named_kernels() -> contextlib.AbstractContextManager[None]:
    """CPU kernels that Inductor makes meanwhile tell a profiler when they run, and their names."""
    return _inductor_config.patch({"cpp.enable_kernel_profile": True})


def without_autograd_cache() -> contextlib.AbstractContextManager[None]:
    """AOTAutograd's disk cache does not see our rewriting and would replay a graph without it."""
    return _functorch_config.patch(enable_autograd_cache=False)


def compile_id() -> str:
    """Of the frame that Dynamo compiles now, as "0/0"; ranges of its runs have it after REGION."""
    return str(_CompileContext.current_compile_id() or "")


def call_compiled_apart(
    function: Callable, backend: Callable, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Calls ``torch.compile(function, backend=backend)`` once, with each backward compiled beside
    its forward and not when it is called first. It counts toward no limit of others'
    recompilations, and sizes that it sees make nobody else's dynamic.
    """
    _private("torch._functorch", "config.force_non_lazy_backward_lowering")
    isolated: dict[str, Any] = {"isolate_recompiles": True} if _can_isolate else {}
    scope: dict[str, Callable] = {"function": function}
    # Dynamo remembers what it compiled by the code of a frame; this frame is like no other.
    exec("def call(*args, **kwargs):\n    return function(*args, **kwargs)\n", scope)
    call = scope["call"]
    try:
        with (
            _functorch_config.patch(force_non_lazy_backward_lowering=True),
            torch._dynamo.config.patch(automatic_dynamic_shapes=False),
        ):
            torch.compile(call, backend=backend, **isolated)(*args, **kwargs)
    finally:
        _reset_code(call.__code__)
        del scope["function"]  # which Dynamo's guards would keep alive with the frame


def inline_only(function: Callable) -> Callable:
    """Lets Dynamo trace ``function`` where it is called from a traced frame, but never compile it
    alone: called from eager code, between two graphs say, it runs for real, and finds
    ``torch.compiler.is_compiling()`` false.
    """
    _skip_code(function.__code__)
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
