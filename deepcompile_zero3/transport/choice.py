"""The transports that a user may ask for, by name."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from deepcompile_zero3.runtime import _C
    from deepcompile_zero3.transport.connection import Connection

TransportName = Literal["auto", "shared_memory", "c10d"]

# The environment variable that says what "auto" means in this process.
ENVIRONMENT = "ZERO3_TRANSPORT"


class Connects(Protocol):
    """Connects parameters by a transport from outside of this package."""

    def __call__(
        self,
        fulls: Sequence[torch.Tensor],
        layouts: "Sequence[_C.RowLayout]",
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> "Sequence[Connection]":
        """Returns a connection for each of ``fulls``. Collective.

        The arguments are those of :class:`connection.Connector`.
        """


# Transports from outside, by the names that users give to ``fully_shard``.
OTHERS: dict[str, Connects] = {}


def resolve(transport: TransportName) -> TransportName:
    """Returns the transport that the argument of ``fully_shard`` asks for.

    Raises:
        ValueError: the argument or the environment variable names no transport.
    """
    source = "transport"
    if transport == "auto" and ENVIRONMENT in os.environ:
        transport, source = os.environ[ENVIRONMENT], ENVIRONMENT  # type: ignore[assignment]
    known = (*get_args(TransportName), *OTHERS)
    if transport not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"{source} is one of {names}, got {transport!r}")
    return transport
