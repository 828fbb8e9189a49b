"""Torch's caches of compiled graphs: where they are, what may go there, what was left half-done."""

import contextlib
import functools
import pathlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from deepcompile_zero3.torch_internals.compiler import (
    custom_partitioner,
    functorch_config,
    inductor_config,
    setting,
)
from deepcompile_zero3.torch_release import private

_cache_dir: Callable[[], str] = private("torch._inductor.runtime.cache_dir_utils", "cache_dir")
_lock_folder: Callable[[], str] = private("torch._inductor.codecache", "get_lock_dir")
_build_folder: str = private("torch._inductor.cpp_builder", "_BUILD_TEMP_DIR")  # its suffix

# Settings of Inductor and AOTAutograd with which ranks communicate while they compile. A rank must
# not wait for another then. Not every release has all of them.
COMMUNICATING = (
    "distributed_max_autotune_gemm",
    "reorder_for_compute_comm_overlap",
    "aten_distributed_optimizations.enable_overlap_scheduling",
)
COMMUNICATING_IN_AOT = ("_sync_decision_cross_ranks", "_sync_cache_decision_cross_ranks")


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


def config_key(config: Mapping[str, Any]) -> tuple[str, *tuple[bytes, ...]] | None:
    """Returns torch's version and the settings of its compilers, None if one cannot be pickled.

    Args:
        config: changes to Inductor's settings.
    """
    try:
        changes = [pickle.dumps(item) for item in sorted(config.items(), key=lambda item: item[0])]
        settings = functorch_config.save_config(), inductor_config.save_config()
    except Exception:  # a setting's own code may have raised it
        return None
    return (torch.__version__, *settings, *changes)


def why_not_stored(config: Mapping[str, Any]) -> str:
    """Returns why no rank may store a graph that it compiles for others to load, "" if it may.

    Args:
        config: changes to Inductor's settings.
    """
    stores = setting(config, "fx_graph_cache") and not setting(config, "force_disable_caches")
    if not (stores and functorch_config.enable_autograd_cache):
        return (
            "torch's caches are off: unset TORCHINDUCTOR_FORCE_DISABLE_CACHES, "
            "TORCHINDUCTOR_FX_GRAPH_CACHE and TORCHINDUCTOR_AUTOGRAD_CACHE, or set the latter to 1"
        )
    communicating = [name for name in COMMUNICATING if setting(config, name)]
    communicating += [
        name for name in COMMUNICATING_IN_AOT if getattr(functorch_config, name, False)
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


def without_autograd_cache() -> contextlib.AbstractContextManager[None]:
    """Disables AOTAutograd's disk cache while the block runs."""
    return functorch_config.patch(enable_autograd_cache=False)


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
