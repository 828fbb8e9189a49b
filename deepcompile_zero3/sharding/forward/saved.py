"""ZeRO-3 memory in eager code: backward gathers parameters again of which autograd saves views.

::

    forward    save(view of a gathered tensor)  ->  (parameter, size, stride, offset)
    backward   first such view of a group       ->  all_gather of the group
               last one released                ->  the gathered tensors are freed

There are no counters. The saved views own the tensors that were gathered for them, and autograd
releases the views as backward passes. See
https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.forward.all_gather import AllGather
from deepcompile_zero3.sharding.parameter import ShardedParameter

if TYPE_CHECKING:
    from deepcompile_zero3.sharding.group import ParameterGroup


class _Regather:
    """Gathers the parameters of one forward of a group again, when backward needs the first.

    It gathers the parameters that the forward saved. Ranks may save different ones: where they have
    to meet for a gather, it gathers all parameters of the group. If the shared copy was
    overwritten, all ranks must gather it again together. After its gather it starts the gathers of
    the groups in ``following``.
    """

    def __init__(
        self,
        all_parameters: Sequence[ShardedParameter],
        regathers_by_group: WeakValueDictionary[ParameterGroup, _Regather],
        following: Iterable[ParameterGroup],
    ) -> None:
        self.parameters: dict[ShardedParameter, None] = {}
        self._all = all_parameters
        self._epochs = _C.ForwardEpochs([parameter.handle for parameter in all_parameters])
        self._regathers_by_group = regathers_by_group
        self._following = following
        self._gathering: AllGather | None = None
        self._fulls: dict[ShardedParameter, torch.Tensor] = {}
        self._backward = -1  # number of the backward they are gathered for

    def start(self) -> None:
        if self._backward != _C.running_backward():
            # A retained graph runs again: parameters may have changed since.
            self._backward = _C.running_backward()
            self._fulls.clear()
            self._gathering = None
            if self._epochs.begin_backward():
                self.parameters = dict.fromkeys(self._all)  # in one order on all ranks
        if self._gathering is not None:
            return
        for saved in self.parameters:
            if (held := saved.handle.gathered) is not None:
                self._fulls.setdefault(saved, held)
        if missing := [saved for saved in self.parameters if saved not in self._fulls]:
            self._gathering = AllGather(missing)

    def full(self, parameter: ShardedParameter) -> torch.Tensor:
        self.start()
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            self._fulls.update(gathering.wait())
            for group in self._following:
                if (regather := self._regathers_by_group.get(group)) is not None:
                    regather.start()
        return self._fulls[parameter]


@dataclass
class _SavedView:
    """A view of a gathered tensor, or a DTensor around such a view, without the tensor itself."""

    regather: _Regather
    parameter: ShardedParameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    spec: Any

    def unpack(self) -> torch.Tensor:
        full = self.regather.full(self.parameter)
        if torch_internals.is_wrapper(full):
            return full  # `_pack` takes no views of it
        view = full.as_strided(self.size, self.stride, self.offset)
        return view if self.spec is None else torch_internals.with_spec(view, self.spec)


class SavedTensors:
    """Saved-tensors hooks of one outermost forward, from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._outer = torch_internals.outer_saved_tensors_hooks()
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        # Keyed by ``_address``, which is not reused while the tensor is here.
        self._watched: dict[int, tuple[_Regather, ShardedParameter, torch.Tensor]] = {}
        self._watched_storages = _C.WatchedStorages()  # the same addresses
        self._storages: dict[ParameterGroup, list[int]] = {}  # the keys above
        self._regathers: WeakValueDictionary[ParameterGroup, _Regather] = WeakValueDictionary()

    def start(self) -> None:
        """Starts packing on this thread."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            _C.pack_hook(self._watched_storages, self._pack) if self._outer is None else self._pack,
            _C.unpack_hook,
        )
        self._hooks.__enter__()

    def stop(self) -> list[ParameterGroup]:
        """Stops packing, and returns the groups that are still watched."""
        hooks, self._hooks = self._hooks, None  # the hooks hold this object: let go of them
        if hooks is not None:
            hooks.__exit__()
        groups = list(self._storages)
        # Autograd keeps the hooks, and so this object, as long as the packed tensors.
        self._storages.clear()
        self._watched.clear()
        self._watched_storages.clear()
        return groups

    def is_watching(self, group: ParameterGroup) -> bool:
        """Returns whether the forward has watched ``group``, and has not unwatched it since."""
        return group in self._storages

    def watch(
        self,
        group: ParameterGroup,
        parameters: Sequence[ShardedParameter],
        following: Iterable[ParameterGroup] = (),
    ) -> None:
        """Packs the gathered tensors of ``parameters``, of a group, until ``unwatch(group)``.

        Once a backward has gathered them again, it starts to gather the groups in ``following``.
        """
        regather = self._regathers[group] = _Regather(parameters, self._regathers, following)
        self._storages[group] = []
        for parameter in parameters:
            full = parameter.handle.gathered
            if full is not None:
                storage = _address(full)
                self._watched[storage] = regather, parameter, full
                self._watched_storages.watch(storage)
                self._storages[group].append(storage)
                if parameter.ranks_meet_in_backward:
                    regather.parameters[parameter] = None

    def unwatch(self, group: ParameterGroup) -> None:
        """Stops watching the gathered tensors of ``group``."""
        for storage in self._storages.pop(group, ()):
            del self._watched[storage]
            self._watched_storages.unwatch(storage)

    @torch_internals.disable_dynamo
    def _pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        local, spec = tensor, None
        if isinstance(tensor, DTensor):
            local, spec = torch_internals.local_tensor(tensor), torch_internals.spec_of(tensor)
        dense = local.layout == torch.strided
        found = self._watched.get(_address(local)) if dense else None
        if found is not None and _is_view(local, found[2]):
            regather, parameter, _ = found
            regather.parameters[parameter] = None
            offset = local.storage_offset()
            return _SavedView(
                regather, parameter, local.size(), local.stride(), offset, spec
            ).unpack
        if self._outer is not None:
            pack_hook, unpack_hook = self._outer
            return functools.partial(unpack_hook, pack_hook(tensor))
        return _C.SavedTensor(tensor).unpack


def _address(tensor: Any) -> int:
    """Returns the address of the storage of a tensor, or of the first tensor in a wrapper."""
    if torch_internals.is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()
        return _address(getattr(tensor, names[0]))
    return torch_internals.storage_address(tensor)


def _is_view(tensor: torch.Tensor, full: torch.Tensor) -> bool:
    """Returns whether ``tensor``, of the same address, is made of ``full`` by ``as_strided``.

    A wrapper has no views that could be made of another one like it.
    """
    if torch_internals.is_wrapper(full):
        alike = type(tensor) is type(full) and tensor.size() == full.size()
        return alike and tensor.stride() == full.stride()
    if torch_internals.is_wrapper(tensor) or tensor.dtype != full.dtype:
        return False
    return not (tensor.is_conj() or tensor.is_neg())
