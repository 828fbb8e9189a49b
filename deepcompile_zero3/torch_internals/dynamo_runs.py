"""What Dynamo has compiled, where it broke graphs and why, and calls that it compiles apart."""

import contextlib
import inspect
import os
import pathlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepcompile_zero3.torch_internals.compiler import with_eager_backwards
from deepcompile_zero3.torch_release import private

REGION = "Torch-Compiled Region: "  # prefix of a compiled frame's range in a profile
# An error that a backend raises comes as one of these.
BackendCompilerFailed: Any = private("torch._dynamo.exc", "BackendCompilerFailed")
_CompileContext: Any = private("torch._guards", "CompileContext")
_counters: Any = private("torch._dynamo.utils", "counters")
_reset_code: Callable[..., None] = private("torch._dynamo.eval_frame", "reset_code")
_graph_break_reasons: list[Any] = private("torch._dynamo.output_graph", "graph_break_reasons")
# Releases before 2.13 may not have the argument.
_can_isolate = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_FOLLOWS = "step_unsupported"  # a frame broke because a frame it calls did, and told why
_BRANCH = "Data-dependent branching"  # Dynamo's reason in frames that other frames call


def compile_id() -> str:
    """Returns the id of the frame that Dynamo compiles now, such as "0/0", or "".

    In a profile, the ranges of its runs have the id after ``REGION``.
    """
    return str(_CompileContext.current_compile_id() or "")


def count_of_graphs() -> int:
    """Returns how many graphs of Dynamo's this process has compiled."""
    return _counters["stats"]["unique_graphs"]


def count_of_stored_graphs() -> int:
    """Returns how often this process stored a graph in AOTAutograd's cache, or found one there."""
    counts = _counters["aot_autograd"]
    return counts["autograd_cache_saved"] + counts["autograd_cache_hit"]


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


def why_not_compiled() -> str:
    """Returns why ``torch.compile`` has left a call as it was, and the remedy; "" if unknown."""
    config = torch._dynamo.config
    if config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is off: unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE"
    if config.suppress_errors:
        return "its error was suppressed: unset TORCHDYNAMO_SUPPRESS_ERRORS to see it"
    return ""


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
