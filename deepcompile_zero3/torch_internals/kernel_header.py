"""The precompiled header of Inductor's C++ kernels, made while Python still traces a graph."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Mapping
from typing import Any

from deepcompile_zero3.torch_internals import compiler
from deepcompile_zero3.torch_release import private

# Makes the header that a kernel needs, and hands the rest of the work to ``submit_fn``.
_load_kernel: Callable[..., Any] = private(
    "torch._inductor.codecache", "CppPythonBindingsCodeCache.load_pybinding_async"
)
_choose_vector_instructions: Callable[[], Any] = private(
    "torch._inductor.cpu_vec_isa", "pick_vec_isa"
)

# Inductor looks for names of vector classes, and chooses flags on which the header depends.
_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(at::vec::Vectorized<float>* values) {}
"""


def precompile_header(config: Mapping[str, Any]) -> None:
    """Starts to precompile what all C++ kernels include, in a thread.

    Inductor does so once it has made a graph's first kernel, and waits: a second where an earlier
    process of this machine has left the header, eight where none has. A process that ends before
    waits for the thread: half a header would make all later compilations slow.

    Args:
        config: changes to Inductor's settings.
    """
    with compiler.changed_settings(config):
        # Once for the process, and not in two threads: while it compiles, it changes flags.
        _choose_vector_instructions()
        settings = contextvars.copy_context()
    threading.Thread(target=settings.run, args=(_precompile,)).start()


def _precompile() -> None:
    with contextlib.suppress(Exception):  # an error of a compiler, which Inductor raises too
        _load_kernel([], _KERNEL, submit_fn=_compile_no_kernel)


def _compile_no_kernel(work: object) -> None:
    """Takes the rest of the work, once the header is there."""
