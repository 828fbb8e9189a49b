"""Names of the transports that a user may ask for."""

import os
from typing import Literal, get_args

TransportName = Literal["auto", "shared_memory", "c10d"]

# The environment variable that says what "auto" means in this process.
ENVIRONMENT = "ZERO3_TRANSPORT"


def resolve(transport: TransportName) -> TransportName:
    """Returns the transport that the argument of ``fully_shard`` asks for.

    Raises:
        ValueError: the argument or the environment variable names no transport.
    """
    source = "transport"
    if transport == "auto" and ENVIRONMENT in os.environ:
        transport, source = os.environ[ENVIRONMENT], ENVIRONMENT  # type: ignore[assignment]
    if transport not in get_args(TransportName):
        names = ", ".join(map(repr, get_args(TransportName)))
        raise ValueError(f"{source} is one of {names}, got {transport!r}")
    return transport
