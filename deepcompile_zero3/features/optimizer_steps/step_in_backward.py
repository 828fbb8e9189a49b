"""``step_in_backward``: an optimizer steps parameters while the backward still computes."""

import threading
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.optimizer_steps.local_step import check_optimizer
from deepcompile_zero3.features.optimizer_steps.step_layers import parameters_replaced
from deepcompile_zero3.sharding.gradients.sink import say_taken
from deepcompile_zero3.sharding.group import group_of
from deepcompile_zero3.sharding.module_parameters import parameters_in
from deepcompile_zero3.sharding.parameter import ShardedParameter


def step_in_backward(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    bucket_mb: float = 64.0,
    is_separate: bool = False,
) -> "StepsInBackward":
    """Makes backwards of ``model`` step its parameters, bucket by bucket, and free the gradients.

    Without it, the shards of all gradients are alive at the end of a backward. With it, a gradient
    lives until its bucket is reduced over the ranks: then hooks of
    ``register_post_accumulate_grad_hook`` run, ``optimizer`` steps the bucket's parameters, and
    ``.grad`` is None again. ``optimizer.step()`` and ``zero_grad()`` after the backward have
    nothing to do, and may stay in the training loop, as schedulers may. Hooks of
    ``optimizer.step`` run for each bucket.

    The step is no longer all or nothing:

    * A backward that raises has stepped some parameters. A warning names them. Continue from a
      checkpoint.
    * Of several micro-batches only the last may step: call
      ``model.set_requires_gradient_sync(False)`` or ``model.set_is_last_backward(False)`` for the
      others.
    * Nothing sees all gradients before a step. :func:`clip_grad_norm_` raises; torch's finds no
      gradients: clip each gradient in a hook. Do not scale the loss: ``torch.amp.GradScaler`` would
      come too late.
    * Some gradients are stepped at the end of the backward: all of the first backward on a mesh
      with replicas and of those under :func:`detect_nonfinite`, and those that reentrant
      checkpoints compute; and those of a model that has run again before its backward, so evaluate
      under ``no_grad``. What a reentrant checkpoint alone computes may be left to
      ``optimizer.step()``.

    Ranks of one host compute gradients in one order, as others have to anyway.

    Args:
        model: a module whose parameters are sharded.
        optimizer: an optimizer of ``torch.optim`` that updates each parameter by itself, as all do
            but LBFGS, Adafactor and, over shards, Muon. Parameters that it does not have are
            delivered to ``.grad`` at the end of the backward.
        bucket_mb: size of a bucket of full gradients in MiB, below 2**40, which replaces the
            default for the parameters of ``optimizer``. Two are alive at once.
        is_separate: says that an optimizer of another class updates each parameter by itself.

    Returns:
        An object whose ``remove()`` ends this.

    Raises:
        Zero3Error: ``optimizer`` has no sharded parameter of ``model``, another optimizer steps
            one in backward already, or a hook of ``set_all_reduce_hook`` waits for all gradients of
            its group.
        ValueError: ``optimizer`` may need several parameters at once, or ``bucket_mb`` is not
            positive or too large.
        TypeError: ``model`` is not a module, or ``optimizer`` is not an optimizer.
    """
    check_optimizer(
        "step_in_backward",
        optimizer,
        is_separate,
        "may need several parameters at once, or other ranks; if it updates each parameter by "
        "itself, pass is_separate=True",
    )
    if not 0 < bucket_mb < 2**40:
        raise ValueError(f"bucket_mb is a positive number of MiB below 2**40, got {bucket_mb!r}")
    found = parameters_in(optimizer, model, "step_in_backward")
    for parameter in found:
        if parameter.sink is not None:
            raise Zero3Error(
                f"step_in_backward: '{parameter.fqn}' is stepped in backward already: call "
                "remove() of what the first call has returned"
            )
        if group_of(parameter).all_reduce_hook is not None:
            raise Zero3Error(
                f"step_in_backward: the hook of set_all_reduce_hook on the group of "
                f"'{parameter.fqn}' gets all gradients at the end of a backward: use only one of "
                "them"
            )
    return StepsInBackward(found, optimizer, int(bucket_mb * 2**20))


class StepsInBackward:
    """The steps of an optimizer in the backwards of a model."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        optimizer: torch.optim.Optimizer,
        bucket_bytes: int,
    ) -> None:
        self._optimizer = optimizer
        self._lock = threading.RLock()  # gradients on two devices come on two threads
        self._before = [(each, each.settings.bucket_bytes) for each in parameters]
        # Names of the parameters stepped by backwards that have not ended, by number of the model.
        self._stepped: dict[int, set[str]] = {}
        for parameter in parameters:
            parameter.sink = self
            say_taken(
                parameter.shard,
                f"backwards step '{parameter.fqn}' (step_in_backward) before all gradients are "
                "known: change each gradient in a hook of register_post_accumulate_grad_hook, or "
                "call remove() and step after the backward",
            )
            parameter.settings = parameter.settings.replace(bucket_bytes=bucket_bytes)
            parameter.deliver_early_if_possible()

    def remove(self) -> None:
        """Leaves all steps to ``optimizer.step()`` again."""
        for parameter, bucket_bytes in self._before:
            parameter.sink = None
            parameter.settings = parameter.settings.replace(bucket_bytes=bucket_bytes)
            say_taken(parameter.shard, None)
            parameter.deliver_early_if_possible()
        self._before = []

    def take(self, parameters: Sequence[ShardedParameter]) -> None:
        """Steps ``parameters``, whose gradients have come."""
        shards = {id(parameter.shard): parameter.shard for parameter in parameters}
        with self._lock:
            given = [group["params"] for group in self._optimizer.param_groups]
            chosen = [[p for p in of_group if id(p) in shards] for of_group in given]
            if sum(map(len, chosen)) != len(shards):
                there = {id(p) for of_group in chosen for p in of_group}
                names = [p.fqn for p in parameters if id(p.shard) not in there]
                raise Zero3Error(
                    f"step_in_backward: the optimizer does not have '{names[0]}' as it is "
                    "registered now: call remove(), and step_in_backward with a new optimizer"
                )
            for parameter in parameters:
                self._stepped.setdefault(parameter.handle.model_number, set()).add(parameter.fqn)
            with parameters_replaced(self._optimizer, chosen):
                self._optimizer.step()
        for shard in shards.values():
            shard.grad = None

    def finish(self, model_numbers: Sequence[int]) -> None:
        """Forgets the parameters that a backward has stepped, which has ended."""
        for number in model_numbers:
            self._stepped.pop(number, None)

    def interrupt(self, model_numbers: Sequence[int]) -> None:
        """Warns of parameters that a backward has stepped, which has raised."""
        names = sorted(name for number in model_numbers for name in self._stepped.pop(number, ()))
        if names:
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            warnings.warn(
                f"a backward has raised after its optimizer had begun to step '{names[0]}'{others} "
                "(step_in_backward), and not the rest: continue from a checkpoint",
                stacklevel=2,
            )
