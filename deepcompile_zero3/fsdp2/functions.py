"""FSDP2's functions beside ``fully_shard``."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.sharding.forward.reads import marks_forward
from deepcompile_zero3.sharding.module import Zero3Module, weak_groups_of


def share_comm_ctx(modules: Iterable[Zero3Module]) -> None:
    """Has no effect: models on the same ranks always share their communication.

    Args:
        modules: sharded modules, such as the stages of a pipeline on this rank.

    Raises:
        ValueError: a module is not sharded.
    """
    weak_groups_of(modules)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of ``module`` a forward: parameters are unsharded in it.

    A method that is no forward reads DTensors, which torch does not mix with tensors. Has no effect
    if ``module`` itself was not given to ``fully_shard``, so that code may call it for any module.

    Args:
        module: the module that has the method.
        method_name: name of the method.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, Zero3Module):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")

    @functools.wraps(method)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return _forward(module, method, args, kwargs)

    setattr(module, method_name, forward)


@marks_forward
@torch_internals.inline_only
def _forward(module: Any, method: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls ``method`` of ``module`` between the hooks of a forward."""
    group = module._zero3_group
    depth = 0 if torch.compiler.is_compiling() else group.depth
    try:
        args, kwargs = group.pre_forward(module, args, kwargs)
        output = method(*args, **kwargs)
    except BaseException:
        if not torch.compiler.is_compiling():
            group.abort_forward(depth)
        raise
    return group.post_forward(module, args, output)
