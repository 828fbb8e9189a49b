"""Small shards that take a step together, in one flat tensor."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.gradients.norms import SMALL
from deepcompile_zero3.torch_internals import local_tensor, spec_of

# torch computes whole vectors, and the remaining elements in another way. Shards of a multiple of
# these bytes have the same bits whether they are stepped together or each by itself.
_WHOLE_VECTORS = 128
# Elements from which torch divides a tensor among threads, at any place.
_DIVIDED = 1 << 15
_FEWEST = 4  # shards that are worth a flat parameter

_States = dict[Any, dict[str, Any]]
# A parameter, its local tensor, that of its gradient, and those of its states.
_Small = list[Any]


class FlatParameter:
    """Shards, their gradients and their states, copied to flat tensors for a step.

    Attributes:
        parameters: the parameters, of one dtype.
        parameter: the flat parameter [sum of the shards' elements], with its gradient.
        state: its state.
    """

    def __init__(self, members: Sequence[_Small], keys: Sequence[str]) -> None:
        """Copies tensors.

        Args:
            members: parameters whose states are alike, and of numbers have the same values.
            keys: names of the states.

        Raises:
            ValueError: tensors are not alike.
        """
        columns: list[tuple[Any, ...]] = list(zip(*members, strict=True))
        self.parameters: tuple[DTensor, ...] = columns[0]
        self._locals: tuple[torch.Tensor, ...] = columns[1]
        self._states = dict(zip(keys, columns[3:], strict=True))
        self.parameter = nn.Parameter(_flat(self._locals, self._locals))
        gradient = _flat(columns[2], self._locals)
        self.parameter.grad_dtype = gradient.dtype
        self.parameter.grad = gradient
        self.state: dict[str, Any] = {}
        for key, each in self._states.items():
            is_number = each[0].dim() == 0
            self.state[key] = each[0].clone() if is_number else _flat(each, self._locals)
        # What is left over after whole vectors of the shards' dtype differs in a smaller one.
        tensors = (gradient, *(each for each in self.state.values() if each.dim() > 0))
        if any(each.itemsize < self.parameter.itemsize for each in tensors):
            raise ValueError("a gradient or a state has smaller elements than the shards")

    @property
    def has_new_states(self) -> bool:
        """Whether the optimizer has made states that the parameters do not have."""
        return self.state.keys() != self._states.keys()

    def store(self, states: _States) -> None:
        """Copies shards and states back, and gives new states to the parameters."""
        # Through DTensors, steps do not count as writes to local tensors.
        _C.copy_from_flat(self.parameter, [local.data for local in self._locals])
        for key, value in self.state.items():
            if key in self._states:
                is_number = value.dim() == 0
                flat = value.expand(len(self._locals)).contiguous() if is_number else value
                _C.copy_from_flat(flat, self._states[key])
                continue
            for parameter, part in zip(self.parameters, self._parts(value), strict=True):
                states[parameter][key] = part

    def _parts(self, value: Any) -> Iterator[Any]:
        """Yields each parameter's part of a state."""
        is_number = not isinstance(value, torch.Tensor) or value.dim() == 0
        offset = 0
        for parameter, local in zip(self.parameters, self._locals, strict=True):
            if is_number:
                yield value.clone() if isinstance(value, torch.Tensor) else value
                continue
            part = value[offset : offset + local.numel()].clone().view(local.shape)
            yield torch_internals.dtensor_like(part, parameter)
            offset += local.numel()


def flat_parameters(given: Iterable[torch.Tensor], states: _States) -> list[FlatParameter]:
    """Returns flat parameters of those of ``given`` that can take a step together.

    Args:
        given: parameters of a group of an optimizer that updates each element by itself.
        states: the optimizer's states. No two tensors of them, and no two parameters, share memory
            (where those of one flat parameter begin at one place, it is not made).
    """
    alike: defaultdict[tuple[Any, ...], list[_Small]] = defaultdict(list)
    for parameter in given:
        state = states.get(parameter) or {}
        if (small := _small(parameter, state)) is not None:
            alike[small[1].dtype, small[2].dtype, *state].append(small)
    found = []
    with torch.inference_mode(False), torch.no_grad():
        for (_, _, *keys), members in alike.items():
            try:
                found += [FlatParameter(each, keys) for each in _chunks(members)]
            except ValueError:  # each takes a step by itself
                continue
    return found


def _small(parameter: torch.Tensor, state: dict[str, Any]) -> _Small | None:
    """Returns ``parameter`` with its tensors, or None if it takes a step by itself."""
    if type(parameter) is not DTensor or type(gradient := parameter.grad) is not DTensor:
        return None
    local = local_tensor(parameter)
    nbytes = local.nbytes
    if not 0 < nbytes <= SMALL or nbytes % _WHOLE_VECTORS or not local.is_cpu:
        return None
    mine, theirs = spec_of(parameter), spec_of(gradient)
    if mine is not theirs and mine.placements != theirs.placements:
        return None
    small = [parameter, local, local_tensor(gradient)]
    for value in state.values():
        kind = type(value)
        if kind is not DTensor and kind is not torch.Tensor:
            return None
        small.append(local_tensor(value) if kind is DTensor else value)
    return small


def _chunks(members: Sequence[_Small]) -> Iterator[list[_Small]]:
    """Yields members of equal numbers, few enough for one tensor and enough to be worth it."""
    _, locals_, _, *states = zip(*members, strict=True)
    if not locals_[0].is_floating_point():
        raise ValueError("torch may step complex numbers as pairs")
    _flat(locals_, locals_)  # no two are in one memory
    numbers = [_flat(each, each[:1] * len(each)).tolist() for each in states if each[0].dim() == 0]
    by_numbers: defaultdict[tuple[float, ...], list[_Small]] = defaultdict(list)
    values = zip(*numbers, strict=True) if numbers else [()] * len(members)
    for member, each in zip(members, values, strict=True):
        by_numbers[each].append(member)
    for equal in by_numbers.values():
        some: list[_Small] = []
        numel = 0
        for member in equal:
            numel += member[1].numel()
            if numel >= _DIVIDED:
                if len(some) >= _FEWEST:
                    yield some
                some, numel = [], member[1].numel()
            some.append(member)
        if len(some) >= _FEWEST:
            yield some


def _flat(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = _C.copy_to_flat(tensors, like)
    if flat is None:
        raise ValueError("tensors have other shapes or dtypes, are not plain, or share memory")
    return flat
