"""``FileOffloadPolicy``: what exceeds a budget of memory lives in a file on a local disk."""

import math
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.options import Options
from deepcompile_zero3.runtime import _C
from deepcompile_zero3.sharding.budget import LOADED_AHEAD, BudgetPolicy
from deepcompile_zero3.sharding.parameter import ShardedParameter


class OffloadStats(NamedTuple):
    """Contents of the file of a :class:`FileOffloadPolicy`, and its traffic since it was made.

    Attributes:
        in_use: bytes of the tensors in the file.
        file_bytes: size of the file in bytes. It does not shrink.
        written: bytes of tensors that were written to the file, or changed in it.
        read: bytes of tensors that were read from it.
        transfer_time: seconds that other threads took for copies: of activations, and of what
            optimizers step.
        wait_time: seconds that computation waited for them. The rest was hidden.
    """

    in_use: int
    file_bytes: int
    written: int
    read: int
    transfer_time: float
    wait_time: float


@dataclass(eq=False)
class FileOffloadPolicy(BudgetPolicy):
    """An ``offload_policy`` of ``fully_shard`` for training with less memory than it takes.

    Each rank may use ``memory_budget_mb`` of memory for gradients, two buckets of gathered
    parameters, a bucket of gradients on their way and of what comes of it, activations on their way
    back, shards, optimizer states and saved activations. What exceeds that goes to a file in
    ``folder``, the cheapest to move first:

    1. activations that compiled forwards save for backward, which other threads write and read
       while the graphs compute (2 bytes are moved in a step for each byte that leaves memory);
    2. states of the optimizers that :func:`offload_optimizer` was called with (2 bytes);
    3. shards (2 bytes in the optimizer's step, and 1 for each gather).

    Gradients stay in memory (:func:`step_in_backward` leaves none, if it is called before the first
    forward). Values are the same bits as without it. Pass one object to all ``fully_shard`` calls
    of a process: its budget is for all of them. What goes is decided when the model first runs.
    Parameters that are sharded after that go to the file.

    The file has no name, takes its space on the disk before data is there, and vanishes with the
    process: nothing is left behind by a crash, and nothing half-written is ever read. Tensors in it
    are ordinary CPU tensors, mapped to memory, so that checkpoints save them as usual. A full disk
    raises a :class:`Zero3Error`. The kernel keeps their pages in memory as long as it has any to
    spare: a budget limits the process's own memory, and that of a control group through the kernel.

    Args:
        folder: a folder on a local disk. A warning tells of one in memory, as ``/tmp`` is on some
            systems.
        memory_budget_mb: the budget in MiB for each rank, at least 0. With 0, the default, all that
            can goes to the file.

    Raises:
        ValueError: ``memory_budget_mb`` is negative, infinite or no number.
        Zero3Error: no file can be made in ``folder``.
    """

    folder: str | os.PathLike
    memory_budget_mb: float = 0.0
    budget: "FileBudget" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        mb = self.memory_budget_mb
        is_number = isinstance(mb, int | float) and not isinstance(mb, bool)
        if not is_number or not 0 <= mb < math.inf:
            raise ValueError(f"memory_budget_mb is a finite number of MiB, at least 0, got {mb!r}")
        self.budget = FileBudget(os.fspath(self.folder), mb * 2**20)
        if self.budget.tier.is_in_memory:
            warnings.warn(
                f"FileOffloadPolicy: '{self.folder}' is in memory (tmpfs): offloading to it saves "
                "nothing, name a folder on a disk",
                stacklevel=3,
            )

    def __deepcopy__(self, memo: dict) -> "FileOffloadPolicy":
        """Returns this object: there is one budget."""
        return self

    def stats(self) -> OffloadStats:
        """Returns the contents of the file, and its traffic."""
        found = self.budget.tier.stats()
        return OffloadStats(*(getattr(found, name) for name in OffloadStats._fields))


class FileBudget:
    """A budget of memory, and the file that takes what exceeds it.

    What goes is decided once, at the first forward of a parameter, for all parameters that are
    there then.

    Attributes:
        tier: the file.
        loaded_ahead: bytes of activations that come back before one is waited for, if several.
    """

    def __init__(self, folder: str, nbytes: float) -> None:
        self.tier = _C.FileTier(folder)
        self.loaded_ahead = LOADED_AHEAD
        self._nbytes = nbytes
        self._parameters: list[weakref.ref[ShardedParameter]] = []
        self._decided: weakref.WeakSet[ShardedParameter] = weakref.WeakSet()
        self._stay: weakref.WeakSet[ShardedParameter] = weakref.WeakSet()
        self._room = 0.0  # bytes that are left for states and activations
        self._states: weakref.WeakKeyDictionary[ShardedParameter, int] = (
            weakref.WeakKeyDictionary()  # bytes that are wanted for each parameter's states
        )

    def add(self, parameter: ShardedParameter) -> None:
        """Makes the budget one for ``parameter`` too."""
        parameter.budget = self
        self._parameters.append(weakref.ref(parameter))

    @property
    def key(self) -> str:
        """Text of all that graphs depend on."""
        return f"{self.tier.number}, {self.activation_bytes:.0f} bytes"

    def place(self, parameter: ShardedParameter) -> None:
        """Moves the shard of ``parameter`` to the file, if the budget offloads it."""
        local = parameter.registered.local
        if self.offloads(parameter) and _is_movable(local) and not _C.is_in_file(local):
            with torch.inference_mode(False), torch.no_grad():  # it is no inference tensor
                local.data = self.tier.copy(local)
                parameter.handle.source.take(parameter.layout.shard_rows(local))

    def offloads(self, parameter: ShardedParameter) -> bool:
        """Returns whether the budget offloads the shard of ``parameter``."""
        self._decide()
        local = parameter.registered.local
        return parameter not in self._stay and not torch_internals.is_wrapper(local)

    def reserve_states(self, parameters: Sequence[ShardedParameter], state_bytes: int) -> None:
        """Reserves room for the states of trained parameters, ``state_bytes`` for each element."""
        for parameter in parameters:
            if parameter.shard.requires_grad:
                self._states[parameter] = state_bytes * _numel_of_shard(parameter)
        self._update_facts()

    def bytes_for_states(self, parameters: Iterable[ShardedParameter]) -> float:
        """Returns the bytes of the states of ``parameters`` that stay in memory."""
        self._decide()
        wanted = sum(self._states.values())
        mine = sum(self._states.get(parameter, 0) for parameter in parameters)
        return min(self._room, wanted) * mine / wanted if wanted else 0.0

    @property
    def activation_bytes(self) -> float:
        """Bytes of saved activations that stay in memory."""
        return max(self._room - sum(self._states.values()), 0.0)

    def _decide(self) -> None:
        """Chooses the shards that stay, unless that is done for parameters that are alive."""
        if self._decided:
            return
        mine = self._alive()
        if not mine:
            return
        groups: Counter[int] = Counter()
        for each in mine:
            groups[id(each.group and each.group())] += each.nbytes
        whole = groups.total()
        gathered = min(max(_BUCKET, *groups.values()), whole)
        bucket = min(max(each.settings.bucket_bytes for each in mine), whole)
        reduced = 2 * bucket  # packed, and what others sent with the sum of both
        if any(each.sink for each in mine):
            reduced += int(sum(self._states.values()) * bucket / max(whole, 1))
        self.loaded_ahead = min(LOADED_AHEAD, whole)
        gradients = sum(map(_nbytes_of_gradient, mine))
        room = self._nbytes - 2 * gathered - reduced - self.loaded_ahead - gradients
        for each in mine:
            nbytes = _numel_of_shard(each) * each.registered.dtype.itemsize
            if nbytes <= room:
                room -= nbytes
                self._stay.add(each)
        self._room = max(room, 0.0)
        self._decided.update(mine)
        self._update_facts()

    def _alive(self) -> list[ShardedParameter]:
        return [each for ref in self._parameters if (each := ref()) is not None]

    def _update_facts(self) -> None:
        for parameter in self._alive():
            parameter.update_facts()


def is_worth_a_file(tensor: object) -> bool:
    """Returns whether ``tensor`` is one that may be moved to a file, and large enough for it."""
    return isinstance(tensor, torch.Tensor) and _is_movable(tensor) and tensor.nbytes >= _SMALL


_SMALL = 64 << 10  # bytes; each tensor in a file takes pages of its own
_BUCKET = int(Options.gather_bucket_mb * 2**20)  # bytes, by default


def _is_movable(tensor: torch.Tensor) -> bool:
    return not torch_internals.is_wrapper(tensor) and _C.is_movable(tensor)


def _numel_of_shard(parameter: ShardedParameter) -> int:
    """Returns the number of elements of a shard, the same on all ranks, which then compile alike.

    Parameters that have an owner count as if ranks owned equal parts of each.
    """
    sizes, world_size = parameter.handle.sizes, parameter.handle.world_size
    return math.prod([-(-sizes[0] // world_size), *sizes[1:]])


def _nbytes_of_gradient(parameter: ShardedParameter) -> int:
    if not parameter.shard.requires_grad or parameter.sink is not None:
        return 0
    dtype = parameter.shard.grad_dtype or parameter.registered.dtype
    return _numel_of_shard(parameter) * dtype.itemsize
