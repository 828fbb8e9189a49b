"""The memory that a rank has for shards, optimizer states and activations."""

from typing import Any, Protocol

from deepcompile_zero3.runtime import _C


class Memory(Protocol):
    """A budget of memory, and the file for what exceeds it; see ``file_offload``."""

    tier: _C.FileTier

    @property
    def room(self) -> float:
        """Bytes that are left for saved activations."""

    @property
    def states(self) -> float:
        """Bytes of optimizer states that stay in memory."""

    def moves(self, parameter: Any) -> bool:
        """Returns whether the shard of ``parameter`` goes to the file."""

    def reserve_states(self, parameters: Any, state_bytes: int) -> None:
        """Reserves room for the optimizer states of ``parameters``, ``state_bytes`` an element."""

    def place(self, parameter: Any) -> None:
        """Moves the shard of ``parameter``, a ``ShardedParameter``, to where it lives."""
