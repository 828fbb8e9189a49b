"""Operators that torch keeps in order by a token, since they print or may raise."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepcompile_zero3.torch_internals import tree_leaves
from deepcompile_zero3.torch_release import private

_TorchDispatchMode: Any = private("torch.utils._python_dispatch", "TorchDispatchMode")
_has_effects: Callable[..., bool] = private("torch._higher_order_ops.effects", "has_effects")
# Some releases ask for the arguments of the call too.
_asks_for_arguments = len(inspect.signature(_has_effects).parameters) > 1


class _Finder(_TorchDispatchMode):  # type: ignore[misc]
    found = False

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        self.found |= has_effects(op, args, kwargs or {})
        return op(*args, **(kwargs or {}))


def has_effects(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of an operator has an effect."""
    return _has_effects(op, args, kwargs) if _asks_for_arguments else _has_effects(op)


def calls_effects(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping) -> bool:
    """Returns whether ``function`` calls an operator with an effect, as far as fake tensors tell.

    True if it cannot be called with these.
    """
    leaves = tree_leaves((args, kwargs))
    modes = [leaf.fake_mode for leaf in leaves if hasattr(leaf, "fake_mode")]
    fake_mode = modes[0] if modes else contextlib.nullcontext()
    try:
        with torch.no_grad(), fake_mode, _Finder() as finder:
            function(*args, **kwargs)
    except Exception:  # for one of many reasons
        return True
    return finder.found
