"""Names of private modules of torch's compiler.

It takes seconds to import: only code that compiles imports it.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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

_TracingContext: Any = private("torch._guards", "TracingContext")
free_unbacked_symbols: Callable[[Any], set] = private(
    "torch.fx.experimental.symbolic_shapes", "free_unbacked_symbols"
)
functorch_config = private("torch._functorch", "config")
inductor_config = private("torch._inductor", "config")
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
    return functorch_config.activation_memory_budget != 1 or any(
        "memory_budget" in node.meta or _MEMORY_BUDGET in node.meta.get("custom", {})
        for node in gm.graph.nodes
    )


_KEEPS_STRIDES = "user_visible_output_idxs"  # in the meta of an output
_MEMORY_BUDGET = "_region_activation_memory_budget"  # an attribute of torch.fx.traceback, from 2.13


def with_named_kernels() -> contextlib.AbstractContextManager[None]:
    """While the block runs, the CPU kernels that Inductor generates report to a profiler.

    They report their names and when they run.
    """
    return changed_settings({"cpp.enable_kernel_profile": True})


def changed_settings(config: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """While the block runs, changes settings of Inductor."""
    return inductor_config.patch(dict(config))


def setting(config: Mapping[str, Any], name: str) -> Any:
    """Returns a setting of Inductor, None if this release has none of that name."""
    if name in config:
        return config[name]
    value = inductor_config
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


# Maps the values of ``torch.compile(mode=...)`` to Inductor's settings.
settings_of_modes: Callable[[], dict[str, dict[str, Any]]] = private(
    "torch._inductor", "list_mode_options"
)


def with_eager_backwards() -> contextlib.AbstractContextManager[None]:
    """While the block runs, compiles each backward with its forward, not at its first call."""
    private("torch._functorch", "config.force_non_lazy_backward_lowering")
    return functorch_config.patch(force_non_lazy_backward_lowering=True)


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
    return functorch_config.patch(donated_buffer=True)


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
