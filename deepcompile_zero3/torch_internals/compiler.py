"""Names of private modules of torch's compiler.

It takes seconds to import: only code that compiles imports it.
"""

import contextlib
import functools
import importlib
import inspect
import os
import pathlib
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from deepcompile_zero3.torch_release import private

# Inductor's own pipeline, which passes the partitioned graphs to a function of ours.
compile_fx: Callable[..., Callable] = private("torch._inductor.compile_fx", "compile_fx")
compile_fx_inner: Callable[..., Callable] = private(
    "torch._inductor.compile_fx", "compile_fx_inner"
)
aot_autograd: Callable[..., Callable] = private("torch._dynamo.backends.common", "aot_autograd")
make_boxed_func: Callable[..., Callable] = private("functorch.compile", "make_boxed_func")
min_cut_rematerialization_partition: Callable = private(
    "functorch.compile", "min_cut_rematerialization_partition"
)

# AOTAutograd's descriptions of the inputs and outputs of a partitioned graph.
PlainAOTInput: Any = private("torch._functorch._aot_autograd.descriptors", "PlainAOTInput")
GradAOTOutput: Any = private("torch._functorch._aot_autograd.descriptors", "GradAOTOutput")
TangentAOTInput: Any = private("torch._functorch._aot_autograd.descriptors", "TangentAOTInput")
_PARTS_OF_SUBCLASSES = tuple(
    private("torch._functorch._aot_autograd.descriptors", f"SubclassGetAttrAOT{kind}")
    for kind in ("Input", "Output")
)
InputMutationAOTOutput: Any = private(
    "torch._functorch._aot_autograd.descriptors", "InputMutationAOTOutput"
)
# The outputs of a forward that are saved for backward. Not every release has the second.
_descriptors = vars(importlib.import_module("torch._functorch._aot_autograd.descriptors"))
SAVED_OUTPUTS: tuple[Any, ...] = tuple(
    _descriptors[name]
    for name in ("SavedForBackwardsAOTOutput", "SavedForBackwardsNoVcCheckAOTOutput")
    if name in _descriptors
)
# Base class of partitioners for Inductor: a callable with a key for Inductor's cache.
CustomPartitionerFn: Any = private("torch._inductor.custom_graph_pass", "CustomPartitionerFn")

autograd_function_apply: Any = private(
    "torch._functorch.autograd_function", "autograd_function_apply"
)
tag_activation_checkpoint: Any = private(
    "torch._higher_order_ops.wrap", "tag_activation_checkpoint"
)
# Calls a subgraph that is compiled once for all calls of one name.
invoke_subgraph: Any = private("torch._higher_order_ops.invoke_subgraph", "invoke_subgraph")

enter_autocast: Callable = private("torch.amp.autocast_mode", "_enter_autocast")
exit_autocast: Callable = private("torch.amp.autocast_mode", "_exit_autocast")

# Writes to the folder that TORCH_TRACE names, if any.
trace_structured: Callable[..., None] = private("torch._logging", "trace_structured")

_CompileContext: Any = private("torch._guards", "CompileContext")
_TracingContext: Any = private("torch._guards", "TracingContext")
REGION = "Torch-Compiled Region: "  # prefix of a compiled frame's range in a profile

# An error that a backend raises comes as one of these.
BackendCompilerFailed: Any = private("torch._dynamo.exc", "BackendCompilerFailed")

_reset_code: Callable[..., None] = private("torch._dynamo.eval_frame", "reset_code")
_counters: Any = private("torch._dynamo.utils", "counters")
_graph_break_reasons: list[Any] = private("torch._dynamo.output_graph", "graph_break_reasons")
# Releases before 2.13 may not have the argument.
_can_isolate = "isolate_recompiles" in inspect.signature(torch.compile).parameters
free_unbacked_symbols: Callable[[Any], set] = private(
    "torch.fx.experimental.symbolic_shapes", "free_unbacked_symbols"
)
_functorch_config = private("torch._functorch", "config")
_inductor_config = private("torch._inductor", "config")
_cache_dir: Callable[[], str] = private("torch._inductor.runtime.cache_dir_utils", "cache_dir")
_lock_folder: Callable[[], str] = private("torch._inductor.codecache", "get_lock_dir")
_build_folder: str = private("torch._inductor.cpp_builder", "_BUILD_TEMP_DIR")  # its suffix
_trace_log: Any = private("torch._logging._internal", "trace_log")


def hint_of(size: int | torch.SymInt) -> int | None:
    """Returns a size, or its example's value if it is a symbol; None if it depends on data.

    Unlike ``int(size)``, makes no guard.
    """
    if isinstance(size, int):
        return size
    return None if free_unbacked_symbols(size) or not size.node.has_hint() else int(size.node.hint)


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Returns the FLOP formulas of operators, keyed by packet.

    A formula takes the operator's arguments and ``out_val``.
    """
    return private("torch.utils.flop_counter", "flop_registry")


def custom_partitioner(config: Mapping[str, Any]) -> Any:
    """Returns the partitioner that Inductor uses with settings changed by ``config``, or None."""
    return setting(config, "custom_partitioner_fn")


def forbid_cuda_graphs(gm: torch.fx.GraphModule, config: dict[str, Any]) -> None:
    """Makes Inductor capture nothing of ``gm``, also where torch is told to capture all graphs."""
    config["triton.cudagraphs"] = False
    gm.meta.pop("cudagraph_annotation", None)  # set by torch._dynamo.override_cudagraphs


def whole_of(description: Any) -> Any:
    """Returns the description of the input or output that a described tensor belongs to.

    A tensor subclass, such as a jagged tensor or a DTensor, comes as its inner tensors.
    """
    while isinstance(description, _PARTS_OF_SUBCLASSES):
        description = description.base
    return description


def describing_inputs() -> dict[str, Any]:
    """Returns Inductor's settings with which AOTAutograd describes the inputs of graphs."""
    # It does not if this is set for all of torch. Not every release has the setting.
    name = "selective_decompose"
    return {name: False} if setting({}, name) else {}


def has_memory_budget(gm: torch.fx.GraphModule) -> bool:
    """Returns whether torch's partitioner computes again what it would save, to save memory.

    A setting of AOTAutograd, or the annotation of a model's operations, gives the budget.
    """
    return _functorch_config.activation_memory_budget != 1 or any(
        "memory_budget" in node.meta or _MEMORY_BUDGET in node.meta.get("custom", {})
        for node in gm.graph.nodes
    )


_KEEPS_STRIDES = "user_visible_output_idxs"  # in the meta of an output
_MEMORY_BUDGET = "_region_activation_memory_budget"  # an attribute of torch.fx.traceback, from 2.13
_FOLLOWS = "step_unsupported"  # a frame broke because a frame it calls did, and told why
_BRANCH = "Data-dependent branching"  # Dynamo's reason in frames that other frames call


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[str]]:
    """Collects where and why Dynamo breaks graphs in the block: "models/gpt.py:310: ...".

    The list is filled when the block ends. A frame that Dynamo gives up as a whole has no place.
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
    """Returns the place of the innermost frame: folder and name of its file, and the line."""
    if not stack:
        return "somewhere"
    path = pathlib.PurePath(stack[-1].filename)
    return f"{pathlib.PurePath(*path.parts[-2:])}:{stack[-1].lineno}"


def with_named_kernels() -> contextlib.AbstractContextManager[None]:
    """While the block runs, the CPU kernels that Inductor generates report to a profiler.

    They report their names and when they run.
    """
    return changed_settings({"cpp.enable_kernel_profile": True})


def changed_settings(config: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """While the block runs, changes settings of Inductor."""
    return _inductor_config.patch(dict(config))


def setting(config: Mapping[str, Any], name: str) -> Any:
    """Returns a setting of Inductor, None if this release has none of that name."""
    if name in config:
        return config[name]
    value = _inductor_config
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


# Maps the values of ``torch.compile(mode=...)`` to Inductor's settings.
settings_of_modes: Callable[[], dict[str, dict[str, Any]]] = private(
    "torch._inductor", "list_mode_options"
)

# Settings of Inductor and AOTAutograd with which ranks communicate while they compile. A rank must
# not wait for another then. Not every release has all of them.
COMMUNICATING = (
    "distributed_max_autotune_gemm",
    "reorder_for_compute_comm_overlap",
    "aten_distributed_optimizations.enable_overlap_scheduling",
)
COMMUNICATING_IN_AOT = ("_sync_decision_cross_ranks", "_sync_cache_decision_cross_ranks")


def why_not_stored(config: Mapping[str, Any]) -> str:
    """Returns why no rank may store a graph that it compiles for others to load, "" if it may.

    Args:
        config: changes to Inductor's settings.
    """
    stores = setting(config, "fx_graph_cache") and not setting(config, "force_disable_caches")
    if not (stores and _functorch_config.enable_autograd_cache):
        return (
            "torch's caches are off: unset TORCHINDUCTOR_FORCE_DISABLE_CACHES, "
            "TORCHINDUCTOR_FX_GRAPH_CACHE and TORCHINDUCTOR_AUTOGRAD_CACHE, or set the latter to 1"
        )
    communicating = [name for name in COMMUNICATING if setting(config, name)]
    communicating += [
        name for name in COMMUNICATING_IN_AOT if getattr(_functorch_config, name, False)
    ]
    if communicating:
        return f"ranks communicate while they compile: {', '.join(communicating)} is set"
    partitioner = custom_partitioner(config)
    if partitioner is not None and partitioner.uuid() is None:
        return "the uuid() of custom_partitioner_fn is None"
    return ""


def may_be_stored(function: Callable, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Inductor's settings with which graphs that call ``function`` may be stored.

    All that the function does must follow from its arguments.

    Args:
        function: a function at the top of a module.
        config: changes to the settings.
    """
    name = "unsafe_marked_cacheable_functions"  # maps names to keys of versions
    return {name: {**setting(config, name), f"{function.__module__}.{function.__qualname__}": ""}}


def cache_folder() -> pathlib.Path:
    """Returns the folder of Inductor's caches."""
    return pathlib.Path(_cache_dir())


def unfinished_objects() -> Iterator[tuple[pathlib.Path, Callable[[], list[pathlib.Path]]]]:
    """Yields the locks of C++ compilers that are writing or did not finish.

    With each comes a function that returns what the compiler did not finish. It is to be called
    with the lock held: a compiler may finish before the lock is taken.

    torch removes the folder ``<name>_CxxBuild`` once ``<name>.so`` is complete, and compiles
    nothing that exists. A folder that was left tells of a writer that was killed or failed.
    """

    def objects(folder: pathlib.Path, name: str) -> list[pathlib.Path]:
        files = folder.parent.glob(f"{name}.*") if folder.exists() else ()
        return [path for path in files if path.suffix in (".so", ".o")]

    for folder in cache_folder().glob(f"??/*_{_build_folder}"):
        name = folder.name.removesuffix(f"_{_build_folder}")
        lock = pathlib.Path(_lock_folder(), f"{name.split('.')[0]}.lock")
        if lock.exists():
            yield lock, functools.partial(objects, folder, name)


def count_of_stored_graphs() -> int:
    """Returns how often this process stored a graph in AOTAutograd's cache, or found one there."""
    counts = _counters["aot_autograd"]
    return counts["autograd_cache_saved"] + counts["autograd_cache_hit"]


def count_of_graphs() -> int:
    """Returns how many graphs of Dynamo's this process has compiled."""
    return _counters["stats"]["unique_graphs"]


def why_not_compiled() -> str:
    """Returns why ``torch.compile`` has left a call as it was, and the remedy; "" if unknown."""
    config = torch._dynamo.config
    if config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is off: unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE"
    if config.suppress_errors:
        return "its error was suppressed: unset TORCHDYNAMO_SUPPRESS_ERRORS to see it"
    return ""


def config_key(config: Mapping[str, Any]) -> tuple[str, *tuple[bytes, ...]] | None:
    """Returns torch's version and the settings of its compilers, None if one cannot be pickled.

    Args:
        config: changes to Inductor's settings.
    """
    try:
        changes = [pickle.dumps(item) for item in sorted(config.items(), key=lambda item: item[0])]
        settings = _functorch_config.save_config(), _inductor_config.save_config()
    except Exception:  # a setting's own code may have raised it
        return None
    return (torch.__version__, *settings, *changes)


def without_autograd_cache() -> contextlib.AbstractContextManager[None]:
    """Disables AOTAutograd's disk cache while the block runs."""
    return _functorch_config.patch(enable_autograd_cache=False)


def with_eager_backwards() -> contextlib.AbstractContextManager[None]:
    """While the block runs, compiles each backward with its forward, not at its first call."""
    private("torch._functorch", "config.force_non_lazy_backward_lowering")
    return _functorch_config.patch(force_non_lazy_backward_lowering=True)


def keep_from_being_stored(backward: torch.fx.GraphModule) -> None:
    """Keeps AOTAutograd from storing a partitioned backward beside what it is compiled to.

    Only compiled autograd, which is refused, would read it. A graph that is stored with graphs in
    it is traced whenever it is loaded, and that fails if sizes are dynamic. The copy of the graph
    that is compiled, and Inductor's key of it, are not concerned.
    """
    backward.__reduce__ = lambda: (_was_not_stored, ())  # type: ignore[method-assign]


def _was_not_stored() -> Any:
    raise NotImplementedError(
        "compiled autograd cannot run a backward that was stored: turn it off"
    )


def is_traced() -> bool:
    """Returns whether ``TORCH_TRACE`` collects what compilers do."""
    return bool(_trace_log.handlers)


def makes_cpp_wrapper(config: Mapping[str, Any]) -> bool:
    """Returns whether Inductor makes a wrapper in C++, in which not every release has subgraphs."""
    return bool(setting(config, "cpp_wrapper"))


def noting_donations() -> contextlib.AbstractContextManager[None]:
    """While the block runs, AOTAutograd notes what :func:`forbid_donation` is to forbid.

    Users may turn this off. Where nothing is noted, AOTAutograd takes all for donated.
    """
    return _functorch_config.patch(donated_buffer=True)


def forbid_donation() -> None:
    """Keeps the backward of the graph that is compiled now from writing to what forward saved.

    The compilers of a forward and of a backward call it, of a graph that was traced while
    AOTAutograd was :func:`noting_donations`. It has noted by then which saved tensors a backward
    may overwrite: they are "donated". It refuses ``retain_graph=True`` as long as there are any,
    except in the first call of a backward that is compiled in that call.
    """
    context = _TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        # In place: the description of a graph with tensor subclasses has this list too.
        donated: list[int] | None = context.fw_metadata.bw_donated_idxs
        if donated is not None:
            donated.clear()


def differentiable_region(name: str) -> Callable | None:
    """Returns what differentiates a region in the trace that runs now, or None.

    ``invoke_subgraph`` stores it by the region's name when it is first called, once it has checked
    that the region writes to no argument. Not every release does.
    """
    caches = getattr(_TracingContext.try_get(), "hop_dispatch_set_cache", None)
    stored = None if caches is None else caches.get_cache(invoke_subgraph)
    find = getattr(stored, "get_autograd_key_entry", None)
    return None if find is None else find(name)


def set_results(graph: torch.fx.Graph, results: Sequence[torch.fx.Node | None]) -> None:
    """Makes a graph return ``results``.

    Inductor has noted the outputs that keep their strides, by position, and expects nodes there. It
    may pad the rows of others on a GPU.
    """
    graph.output_node().args = (tuple(results),)
    keep_strides(graph, ())


def keep_strides(graph: torch.fx.Graph, positions: Iterable[int]) -> None:
    """Makes Inductor keep the strides of more of a graph's outputs."""
    output = graph.output_node()
    results: Any = output.args[0]
    keep = {*output.meta.get(_KEEPS_STRIDES, ()), *positions}
    output.meta[_KEEPS_STRIDES] = [i for i, r in enumerate(results) if i in keep and r is not None]


def rename(node: torch.fx.Node, name: str) -> None:
    """Renames ``node`` to ``name``, with a number appended if another node has that name."""
    node._rename(name)


def compile_id() -> str:
    """Returns the id of the frame that Dynamo compiles now, such as "0/0", or "".

    In a profile, the ranges of its runs have the id after ``REGION``.
    """
    return str(_CompileContext.current_compile_id() or "")


def raised_in_backend(error: BaseException) -> BaseException:
    """Returns the error of a backend behind ``error``, or ``error`` if it is of no backend."""
    while isinstance(error, BackendCompilerFailed):  # Inductor's is one in the other backend's
        error = error.inner_exception
    return error


def call_compiled_apart(
    function: Callable, backend: Callable, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Calls ``torch.compile(function, backend=backend)`` once, apart from other compiled code.

    Each backward is compiled with its forward, not when it is first called. The call does not count
    toward the recompilation limits of others. Sizes that it sees make no other code dynamic.
    """
    isolated: dict[str, Any] = {"isolate_recompiles": True} if _can_isolate else {}
    scope: dict[str, Callable] = {"function": function}
    # Dynamo caches by the code object of a frame. This frame has its own.
    exec("def call(*args, **kwargs):\n    return function(*args, **kwargs)\n", scope)
    call = scope["call"]
    try:
        with (
            with_eager_backwards(),
            torch._dynamo.config.patch(automatic_dynamic_shapes=False),
        ):
            torch.compile(call, backend=backend, **isolated)(*args, **kwargs)
    finally:
        _reset_code(call.__code__)
        del scope["function"]  # else Dynamo's guards keep it alive with the frame
