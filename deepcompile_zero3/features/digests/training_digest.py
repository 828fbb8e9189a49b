"""``training_digest``: a number for the bits of each shard, gradient and state of an optimizer."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.features.digests.element_sums import ElementSums, Ranges
from deepcompile_zero3.features.digests.over_ranks import Sum, add_up, as_int64, number_of
from deepcompile_zero3.features.digests.places import (
    KnownPlaces,
    is_counted,
    without_partial_sums,
)
from deepcompile_zero3.sharding.names import plain_name

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


@dataclass(frozen=True)
class TrainingDigest:
    """Digests by name, each of 16 hexadecimal digits. Two of them are equal if all digests are.

    Attributes:
        shards: the digest of each parameter, by FQN.
        gradients: the digest of each gradient, by FQN. Parameters without one are not in it.
        states: the digests of an optimizer's states, by FQN of the parameter and name of the state.
    """

    shards: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, str]] = field(default_factory=dict)


@torch.no_grad()
def training_digest(
    model: nn.Module, optimizer: Optimizers = None, *, group: dist.ProcessGroup | None = None
) -> TrainingDigest:
    """Returns digests of the parameters of ``model``, their gradients and states. Collective.

    A digest depends on the full tensor alone: on dtype, shape, and the bits and the index of each
    element. It is the same for any number of ranks, any mesh and any placement, and for a model
    that is not sharded. One bit that changes always changes it. Shards are read where they are, and
    ranks exchange a few numbers for each tensor.

    It costs a pass over shards, gradients and states, about as long as reading them takes on a CPU,
    so that :class:`DigestLog` takes one every tenth step. Call it between steps: after
    ``optimizer.step()``, and before ``zero_grad()`` if gradients are to be in it.

    Replicas count once: those of the first ranks in their mesh. A plain tensor counts once too, if
    it is equal on all ranks; if it is not, the digest shows it. A plain state of the shape of a
    rank's shard is divided as the shard is. Buffers, and a parameter that is a tensor subclass with
    other tensors in it, are exceptions: the former have no digest, and the digest of the latter is
    that of the payload, in this layout.

    Args:
        model: a module, sharded or not. Names are its own: those that ``torch.compile`` and
            ``checkpoint_wrapper`` add are left out.
        optimizer: an optimizer of its parameters, or several. A parameter that is not in ``model``
            is called ``param_groups.0.1``, by group and position, or of several optimizers
            ``optimizers.0.param_groups.0.1``.
        group: the ranks that have the model; all ranks of the job by default.

    Raises:
        Zero3Error: a DTensor has placements that are not known, or a rank does not come.
        TypeError: ``model`` is not a module, or ``optimizer`` is not an optimizer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"training_digest: model must be a module, got {type(model).__name__}")
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    mine = _sums(list(_entries(model, _optimizers(optimizer))))
    found: dict[tuple[str, str, str], int] = {}
    for name, value in add_up(mine, group).items():
        *key, described = json.loads(name)
        kind, fqn, state = key
        found[kind, fqn, state] = found.get((kind, fqn, state), 0) + value + number_of(described)
    digest = TrainingDigest()
    for (kind, fqn, state), value in found.items():
        text = f"{value & (1 << 64) - 1:016x}"
        match kind:
            case "shard":
                digest.shards[fqn] = text
            case "gradient":
                digest.gradients[fqn] = text
            case _:
                digest.states.setdefault(fqn, {})[state] = text
    return digest


class _Entry(NamedTuple):
    """A value that gets a digest.

    Attributes:
        key: kind, FQN of the parameter and name of the state or "".
        value: a tensor, or a number, a string, a bool or None.
        parameter: the parameter that a state belongs to.
    """

    key: tuple[str, str, str]
    value: Any
    parameter: torch.Tensor


def _optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    found = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    found = list(found) if isinstance(found, Iterable) else [found]
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"training_digest: optimizer must be an optimizer, got {type(each).__name__}"
            )
    return found


def _entries(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[_Entry]:
    fqns: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters():
        fqns[parameter] = fqn = plain_name(name)
        yield _Entry(("shard", fqn, ""), parameter, parameter)
        if parameter.grad is not None:
            yield _Entry(("gradient", fqn, ""), parameter.grad, parameter)
    for index, optimizer in enumerate(optimizers):
        of = f"optimizers.{index}." if len(optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                fqn = fqns.get(parameter, f"{of}param_groups.{number}.{position}")
                for path, value in _leaves(optimizer.state.get(parameter, {})):
                    yield _Entry(("state", fqn, ".".join(path)), value, parameter)


def _leaves(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the values in nested dicts and lists, each with the keys that lead to it."""
    if isinstance(value, dict):
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    else:
        if value is None or isinstance(value, torch.Tensor | int | float | str):
            yield (), value
        return
    for key, each in inner:
        for path, leaf in _leaves(each):
            yield (str(key), *path), leaf


def _sums(entries: list[_Entry]) -> dict[str, Sum]:
    """Returns this rank's part of the sum of each entry, by key and description, as JSON."""
    sums, known = ElementSums(), KnownPlaces()
    found: dict[str, tuple[int | None, int | torch.Tensor]] = {}
    for key, value, parameter in entries:
        if not isinstance(value, torch.Tensor):
            found[json.dumps([*key, repr(value)])] = None, 0
            continue
        placed = _placed_as(value, parameter)
        copy = None if placed is None else known.lowest_rank(placed)
        shape = [*(value if placed is None else placed).shape]
        total = _local_sum(key[1], value, placed, sums, known)
        found[json.dumps([*key, f"{value.dtype} {shape}"])] = copy, total
    values = _numbers([total for _, total in found.values()])
    return {
        name: Sum(value, copy)
        for (name, (copy, _)), value in zip(found.items(), values, strict=True)
    }


def _placed_as(value: torch.Tensor, parameter: torch.Tensor) -> DTensor | None:
    """Returns a DTensor with the placements of ``value``, or None if each rank has all of it."""
    if isinstance(value, DTensor):
        return value
    if isinstance(parameter, DTensor) and value.dim() > 0:
        local = torch_internals.local_tensor(parameter)
        if value.shape == local.shape:  # a state of an optimizer that steps local tensors
            return parameter
    return None


def _local_sum(
    fqn: str,
    value: torch.Tensor,
    placed: DTensor | None,
    sums: ElementSums,
    known: KnownPlaces,
) -> int | torch.Tensor:
    """Returns the sum over this rank's elements of ``value``: see :meth:`ElementSums.of`."""
    if placed is None:
        return _sum_of(value, value.shape, [(range(size),) for size in value.shape], sums)
    if isinstance(value, DTensor):
        placed = without_partial_sums(value)
        value = torch_internals.local_tensor(placed)
    if not is_counted(placed) or value.numel() == 0:
        return 0
    return _sum_of(value, placed.shape, known.of(fqn, placed, value.shape), sums)


def _sum_of(
    local: torch.Tensor, shape: Sequence[int], places: Sequence[Ranges], sums: ElementSums
) -> int | torch.Tensor:
    if not torch_internals.is_wrapper(local):
        return sums.of(local, shape, places)
    wrapper: Any = local
    total: int | torch.Tensor = 0
    for name in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, name)
        # The place of the payload is the place of the part, and the name.
        key = number_of(f"{name} {places}") | 1
        every = [(range(size),) for size in inner.shape]
        total = total + _sum_of(inner, inner.shape, every, sums) * key
    return total


def _numbers(totals: list[int | torch.Tensor]) -> list[int]:
    """Returns the sums as int64, copied from each device at once."""
    numbers = [0 if isinstance(total, torch.Tensor) else as_int64(total) for total in totals]
    on_devices = {i: total for i, total in enumerate(totals) if isinstance(total, torch.Tensor)}
    for device in dict.fromkeys(total.device for total in on_devices.values()):
        mine = [i for i, total in on_devices.items() if total.device == device]
        copied = torch.stack([on_devices[i] for i in mine]).tolist()
        for i, number in zip(mine, copied, strict=True):
            numbers[i] = number
    return numbers
