"""``step_in_backward``: an optimizer steps parameters while the backward still computes."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.parameter import ShardedParameter
from deepcompile_zero3.sharding.registered import all_parameters_of

# Attribute of a parameter that has no gradient after a backward.
_IS_STEPPED = "_zero3_is_stepped_in_backward"


def step_in_backward(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, bucket_mb: float = 64.0
) -> None:
    """Makes backwards of ``model`` step its parameters, bucket by bucket, and free the gradients.

    Without it, the shards of all gradients are alive at the end of a backward. With it, a gradient
    lives until its bucket is reduced over the ranks: then hooks of
    ``register_post_accumulate_grad_hook`` run, ``optimizer`` steps the bucket's parameters, and
    ``.grad`` is None again. ``optimizer.step()`` and ``zero_grad()`` after the backward have
    nothing to do, and may stay in the training loop, as schedulers may. The parameters have the
    same bits as after a step of all of them.

    The step is no longer all or nothing:

    * A backward that raises has stepped some parameters. A warning names them. Continue from a
      checkpoint.
    * Of several micro-batches only the last may step: call
      ``model.set_requires_gradient_sync(False)`` or ``model.set_is_last_backward(False)`` for the
      others.
    * Nothing sees all gradients before a step: :func:`clip_grad_norm_` raises, torch's finds no
      gradients, and ``torch.amp.GradScaler`` raises at its step. Clip each gradient in a hook.
    * Backwards under :func:`detect_nonfinite` step at their end, as the first backward on a mesh
      with replicas does.

    Args:
        model: a module whose parameters are sharded.
        optimizer: an optimizer of parameters of ``model``. Parameters that it has not are delivered
            to ``.grad`` at the end of the backward.
        bucket_mb: size of a bucket of full gradients in MiB. Two are alive at once.

    Raises:
        Zero3Error: ``optimizer`` has no sharded parameter of ``model``, another optimizer steps one
            in backward already, or a hook of ``set_all_reduce_hook`` waits for all gradients.
        TypeError: ``model`` is not a module, or ``optimizer`` is no optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"step_in_backward takes an optimizer, got {type(optimizer).__name__}")
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [p for p in all_parameters_of(model, "step_in_backward") if id(p.shard) in given]
    if not found:
        raise Zero3Error(
            "step_in_backward: the optimizer has no sharded parameter of the model: build it over "
            "model.parameters() after fully_shard"
        )
    for parameter in found:
        if parameter.step_early is not None:
            raise Zero3Error(f"step_in_backward: '{parameter.fqn}' is stepped in backward already")
        group = parameter.group and parameter.group()
        if getattr(group, "all_reduce_hook", None) is not None:
            raise Zero3Error(
                f"step_in_backward: the hook of set_all_reduce_hook on the group of "
                f"'{parameter.fqn}' gets all gradients at the end of a backward: remove one of both"
            )
    step = _step_of(optimizer)
    for parameter in found:
        parameter.step_early = step
        setattr(parameter.shard, _IS_STEPPED, True)
        parameter.settings.bucket_bytes = int(bucket_mb * 2**20)
        parameter.settings.delivers_early = parameter.replicas_are_compared


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[Sequence[DTensor]], None]:
    def step(parameters: Sequence[DTensor]) -> None:
        with _only(optimizer, parameters):
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    return step


@contextlib.contextmanager
def _only(optimizer: torch.optim.Optimizer, parameters: Sequence[DTensor]) -> Iterator[None]:
    """Takes all other parameters out of the groups of ``optimizer``."""
    chosen = {id(parameter) for parameter in parameters}
    given = [group["params"] for group in optimizer.param_groups]
    try:
        for group, its_parameters in zip(optimizer.param_groups, given, strict=True):
            group["params"] = [p for p in its_parameters if id(p) in chosen]
        yield
    finally:
        for group, its_parameters in zip(optimizer.param_groups, given, strict=True):
            group["params"] = its_parameters


def run_early_steps(delivered: Sequence[ShardedParameter], at_end: bool) -> None:
    """Steps parameters whose gradients were delivered, if this is the last backward of a step.

    ``at_end`` of the backward, parameters are stepped too that have gradients of earlier ones only.
    """
    parameters = dict.fromkeys(delivered)
    if at_end:
        for model in dict.fromkeys(p.model for p in delivered):
            if model is not None:
                parameters.update(dict.fromkeys(model.parameters))
    by_step: dict[Callable[[Sequence[DTensor]], None], list[DTensor]] = {}
    for parameter in parameters:
        model, step = parameter.model, parameter.step_early
        if step is None or model is None or not model.is_last_backward:
            continue
        parameter.settings.delivers_early = parameter.replicas_are_compared
        if (shard := parameter.shard).grad is not None:
            by_step.setdefault(step, []).append(shard)
    for step, shards in by_step.items():
        step(shards)


def check_has_gradients(parameter: torch.Tensor) -> None:
    """Raises a Zero3Error if a backward steps ``parameter``, which has no gradient afterwards."""
    if hasattr(parameter, _IS_STEPPED):
        raise Zero3Error(
            "clip_grad_norm_: the backward has stepped these parameters (step_in_backward) before "
            "the norm of all gradients was known: clip each gradient in a hook of "
            "register_post_accumulate_grad_hook, or step after the backward"
        )


def _interrupted(fqns: Sequence[str]) -> None:
    names = list(dict.fromkeys(fqns))
    others = f" and {len(names) - 1} others" if len(names) > 1 else ""
    warnings.warn(
        f"a backward has raised after its optimizer had stepped '{names[0]}'{others} "
        "(step_in_backward), and not the rest: continue from a checkpoint",
        stacklevel=2,
    )


_C.set_interrupted(_interrupted)
