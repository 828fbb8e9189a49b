"""ZeRO-3 memory in eager code: backward gathers again what autograd saves of a gathered tensor.

::

    forward    save(view of a gathered tensor)  ->  (parameter, size, stride, offset)
    backward   first such view of a group       ->  all_gather of the group
               last one released                ->  the gathered tensors are freed

There are no counters. The saved views own the tensors that were gathered for them, and autograd
releases the views as backward passes. See
https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.all_gather import AllGather
from deepcompile_zero3.sharding.parameter import ShardedParameter


class _Regather:
    """The parameters of one forward of a group, gathered when backward needs the first.

    These are the parameters that the forward saved. Where ranks have to meet for a gather, they are
    all parameters of the group, since ranks may save different ones. Ranks also have to meet if
    what the forward published is gone. After a gather, it starts the gathers of the owners in
    ``following``.
    """

    def __init__(
        self,
        all_parameters: Sequence[ShardedParameter],
        of_forward: WeakValueDictionary[Hashable, _Regather],
        following: Iterable[Hashable],
    ) -> None:
        self.parameters: dict[ShardedParameter, None] = {}
        self._all = all_parameters
        self._epochs = _C.ForwardEpochs([parameter.handle for parameter in all_parameters])
        self._of_forward = of_forward
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
            if self._epochs.begin_backward_of_forward():
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
            self._fulls.update(zip(gathering.parameters, gathering.wait(), strict=True))
            for owner in self._following:
                if (regather := self._of_forward.get(owner)) is not None:
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
        view = full.as_strided(self.size, self.stride, self.offset)
        return view if self.spec is None else torch_internals.with_spec(view, self.spec)


@dataclass
class _SavedTensor:
    """Any other tensor, detached: an output, saved as it is, would keep its own node alive."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        now = torch_internals.version_of(self.tensor)
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor {list(self.tensor.shape)} of {self.tensor.dtype} is "
                f"at version {now}; expected version {self.version} instead"
            )
        return self.tensor


@dataclass
class _SavedByOther:
    """A value that the saved-tensors hooks around ours have packed."""

    value: Any
    unpack_hook: Callable[[Any], torch.Tensor]

    def unpack(self) -> torch.Tensor:
        return self.unpack_hook(self.value)


@torch_internals.disable_dynamo
def _unpack(packed: _SavedView | _SavedTensor | _SavedByOther) -> torch.Tensor:
    return packed.unpack()


class SavedTensors:
    """Saved-tensors hooks of one outermost forward, from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._outer = torch_internals.outer_saved_tensors_hooks()
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        # Keyed by storage address, which is not reused while the tensor is here.
        self._watched: dict[int, tuple[_Regather, ShardedParameter, torch.Tensor]] = {}
        self._owners: dict[Hashable, list[int]] = {}
        self._regathers: WeakValueDictionary[Hashable, _Regather] = WeakValueDictionary()

    def start(self) -> None:
        """Starts packing on this thread."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def stop(self) -> list[Any]:
        """Stops packing, and returns the owners that are still watched."""
        hooks, self._hooks = self._hooks, None  # the hooks hold this object: let go of them
        if hooks is not None:
            hooks.__exit__()
        owners = list(self._owners)
        # Autograd keeps the hooks, and so this object, as long as what they packed.
        self._owners.clear()
        self._watched.clear()
        return owners

    def watch(
        self,
        owner: Hashable,
        parameters: Iterable[ShardedParameter],
        following: Iterable[Hashable] = (),
    ) -> bool:
        """Packs the gathered tensors of ``parameters`` until ``forget(owner)``.

        Once a backward has gathered them again, it starts to gather those of the owners in
        ``following``.

        Returns:
            Whether ``owner`` was not watched before.
        """
        if owner in self._owners:
            return False
        gathered = [p for p in parameters if p.reshard_after_forward is not False]
        regather = self._regathers[owner] = _Regather(gathered, self._regathers, following)
        self._owners[owner] = []
        for parameter in gathered:
            full = parameter.handle.gathered
            if full is not None:
                storage = torch_internals.storage_address(full)
                self._watched[storage] = regather, parameter, full
                self._owners[owner].append(storage)
                if parameter.ranks_meet_in_backward:
                    regather.parameters[parameter] = None
        return True

    def forget(self, owner: Hashable) -> None:
        """Stops watching what was gathered for ``owner``."""
        for storage in self._owners.pop(owner, ()):
            del self._watched[storage]

    @torch_internals.disable_dynamo
    def _pack(self, tensor: torch.Tensor) -> _SavedView | _SavedTensor | _SavedByOther:
        local, spec = tensor, None
        if isinstance(tensor, DTensor):
            local, spec = torch_internals.local_tensor(tensor), torch_internals.spec_of(tensor)
        dense = local.layout == torch.strided
        found = self._watched.get(torch_internals.storage_address(local)) if dense else None
        if found is not None:
            regather, parameter, _ = found
            regather.parameters[parameter] = None
            return _SavedView(
                regather, parameter, local.size(), local.stride(), local.storage_offset(), spec
            )
        if self._outer is not None:
            pack_hook, unpack_hook = self._outer
            return _SavedByOther(pack_hook(tensor), unpack_hook)
        return _SavedTensor(tensor.detach(), torch_internals.version_of(tensor))
