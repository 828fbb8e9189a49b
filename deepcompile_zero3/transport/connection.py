"""Chooses the transport of each parameter's shards and gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepcompile_zero3.runtime import _C
from deepcompile_zero3.transport.choice import OTHERS, TransportName
from deepcompile_zero3.transport.one_host import MappedMemory, share
from deepcompile_zero3.transport.process_groups import group_for_reductions, neighbors
from deepcompile_zero3.transport.rank_names import rank_names


@dataclass(frozen=True)
class Connection:
    """One parameter's connection to other ranks, of which :meth:`set_transport` makes a transport.

    It does so once all ranks have their connections.

    Attributes:
        medium: the memory that ranks share, or the transport that all parameters of a group use.
        substitute_transport: the transport of sources in place of shards, such as payloads and
            encoded rows. They are converted after the gather, so reading them in shared memory
            would save no copy.
        after_forward: the channel and the messages between the ranks that have a parameter's rows
            between forward and backward, if other ranks do than at other times.
    """

    medium: MappedMemory | _C.Transport
    substitute_transport: _C.Transport
    after_forward: tuple[_C.Channel, _C.Messages] | None = None

    def set_transport(self, parameter: _C.Parameter) -> None:
        """Makes the transport of ``parameter``, and sets it.

        All ranks call this for their parameters in the same order.
        """
        transport: _C.Transport = (
            _C.SharedMemory(
                self.medium.one_host,
                parameter.source,
                self.medium.progress,
                self.medium.copy_memory,
                self.medium.takes_turns,
            )
            if isinstance(self.medium, MappedMemory)
            else self.medium
        )
        parameter.connect(transport, self.substitute_transport)


@dataclass(frozen=True)
class Connector:
    """Connects the parameters that are sharded over some ranks.

    Attributes:
        group: process group of the ranks.
        device: the device that this rank computes on.
        transport: the result of :func:`choice.resolve`.
        take_turns: see :func:`one_host.share`.
        after_forward: number of ranks that parameters are sharded over between forward and
            backward, if messages are exchanged, or None for all.
    """

    group: dist.ProcessGroup
    device: torch.device
    transport: TransportName
    take_turns: bool
    after_forward: int | None

    def __call__(
        self, fulls: Sequence[torch.Tensor], layouts: Sequence[_C.RowLayout]
    ) -> list[Connection]:
        """Connects the parameters ``fulls``, the same on all ranks. Collective.

        Args:
            fulls: parameters as they are computed with, [rows, ...] each, on the meta device.
            layouts: for each parameter, the rows that each rank of the group has.

        Raises:
            Zero3Error: see :func:`one_host.share`.
        """
        group, device = self.group, self.device
        parts = share(fulls, layouts, group, device.type, self.transport, self.take_turns)
        if self.transport in OTHERS:
            return list(OTHERS[self.transport](fulls, layouts, group, device))
        asked = self.transport == "c10d"
        gathers = channel_of(group, device, sends_to_itself=asked)
        if parts is not None:
            payloads = _C.Messages(gathers, gathers)
            return [Connection(part, payloads) for part in parts]
        # To make a process group is collective: it comes before all that may fail on one rank.
        reductions = channel_of(group_for_reductions(group), device, sends_to_itself=asked)
        messages = _C.Messages(gathers, reductions)
        fewer = None
        if self.after_forward is not None:
            channel = channel_of(neighbors(group, self.after_forward), device)
            fewer = channel, _C.Messages(channel, reductions)
        return [Connection(messages, messages, fewer)] * len(fulls)


def channel_of(
    group: dist.ProcessGroup, device: torch.device, *, sends_to_itself: bool = False
) -> _C.Channel:
    """Returns the channel between the ranks of ``group``, for tensors on such a device.

    With ``sends_to_itself``, a group of one rank calls collectives too.
    """
    return _C.ProcessGroupChannel(
        group.group_name, group.rank(), rank_names(group), group.size(), device, sends_to_itself
    )
