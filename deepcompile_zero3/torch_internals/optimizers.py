"""Private names of torch's optimizers."""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import optimizer as _torch_optimizer

from deepcompile_zero3.torch_release import private

# Hooks of ``register_optimizer_step_pre_hook`` and ``_post_hook``, by id.
_hooks_of_all = tuple(
    private("torch.optim.optimizer", f"_global_optimizer_{moment}_hooks")
    for moment in ("pre", "post")
)

# Methods that somebody may replace: a step does not call them.
_NOT_CALLED_BY_STEP = {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"}


def step_hooks(optimizer: Any) -> list[Callable[..., Any]]:
    """Returns the hooks that see the steps of ``optimizer``, its own ones and those of all."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return [hook for hooks in (*own, *_hooks_of_all) for hook in hooks.values()]


def has_step_of_its_class(optimizer: Any) -> bool:
    """Returns whether nobody but a scheduler has put another ``step`` in place of its class's."""
    step = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):  # counts the calls
        step = step.__wrapped__
    return getattr(step, "__func__", step) is type(optimizer).step


def step_of_torch(optimizer: Any) -> Callable[..., Any] | None:
    """Returns the step of an optimizer's class, without hooks.

    Returns None if it is not torch's alone: if somebody has put another function in its place, or
    in that of a method that it calls or of ``torch.optim``'s function for it. Those that this calls
    are not looked at.
    """
    cls = type(optimizer)
    step: Callable[..., Any] | None = getattr(cls.step, "__wrapped__", None)
    if step is None or not hasattr(cls.step, "hooked") or hasattr(step, "hooked"):
        return None  # or wrapped outside of torch's hooks
    names = getattr(inspect.unwrap(step), "__globals__", {})
    functional = names.get(names.get("__name__", "").rpartition(".")[2])  # torch.optim.adam.adam
    if functional is None or not all(map(_is_of_torch, (step, cls._init_group, functional))):
        return None
    replaced = {n for n, value in vars(optimizer).items() if callable(value) and hasattr(cls, n)}
    return None if replaced - _NOT_CALLED_BY_STEP else step


def _is_of_torch(function: Any) -> bool:
    """Returns whether torch defines a function and all those that it wraps.

    A wrapper has the ``__module__`` of what it wraps, but not its ``__globals__``.
    """
    while function is not None:
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def is_stepping() -> bool:
    """Returns whether a thread is inside of an optimizer's step, or of a hook of one.

    Takes time: it looks at all calls of all threads.
    """
    frames: list[FrameType | None] = [*sys._current_frames().values()]
    for frame in frames:
        while frame is not None:
            if frame.f_globals is vars(_torch_optimizer):  # which calls steps and hooks
                return True
            frame = frame.f_back
    return False
