"""The budget of memory that a rank has for shards, optimizer states and activations."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch.distributed.fsdp import OffloadPolicy

from deepcompile_zero3.runtime import _C

if TYPE_CHECKING:
    from deepcompile_zero3.sharding.parameter import ShardedParameter

# At most so many bytes of saved activations come back before a backward waits for the first, if
# there are several.
LOADED_AHEAD = 64 << 20


class BudgetPolicy(OffloadPolicy):
    """An ``offload_policy`` of ``fully_shard`` with one budget for a whole model.

    Attributes:
        budget: the budget.
    """

    budget: "Budget"


class Budget(Protocol):
    """A budget of memory, and the file for what exceeds it; see ``FileOffloadPolicy``."""

    tier: _C.FileTier
    loaded_ahead: int  # bytes of activations that come back before one is waited for

    @property
    def key(self) -> str:
        """Text of all that graphs depend on."""

    @property
    def activation_bytes(self) -> float:
        """Bytes of saved activations that stay in memory."""

    def bytes_for_states(self, parameters: "Iterable[ShardedParameter]") -> float:
        """Returns the bytes of the optimizer states of ``parameters`` that stay in memory."""

    def reserve_states(self, parameters: "Sequence[ShardedParameter]", state_bytes: int) -> None:
        """Reserves room for states of trained ``parameters``, ``state_bytes`` for each element."""

    def add(self, parameter: "ShardedParameter") -> None:
        """Makes the budget one for ``parameter`` too."""

    def offloads(self, parameter: "ShardedParameter") -> bool:
        """Returns whether the shard of ``parameter`` goes to the file."""

    def place(self, parameter: "ShardedParameter") -> None:
        """Moves the shard of ``parameter`` to the file, if the budget offloads it."""
