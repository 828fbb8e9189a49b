"""``stream_full_parameters``: full parameters, one bucket after the other, in bounded memory."""

import contextlib
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from deepcompile_zero3 import torch_internals
from deepcompile_zero3.errors import Zero3Error, check_bool
from deepcompile_zero3.features.streaming.arguments import (
    check_dtype_argument,
    check_megabytes,
    group_of_ranks,
    on_each_rank,
)
from deepcompile_zero3.features.streaming.buckets import Bucket, buckets_of
from deepcompile_zero3.features.streaming.carriers import ByMessages, BySharedMemory, Carrier
from deepcompile_zero3.features.streaming.host_memory import take_memory
from deepcompile_zero3.features.streaming.pieces import entries_of, named_tensors
from deepcompile_zero3.features.streaming.receiver import Connection, SharedMemorySender
from deepcompile_zero3.features.streaming.segments import NoSharedMemory, Segments
from deepcompile_zero3.transport.choice import TransportName, resolve
from deepcompile_zero3.transport.on_all_ranks import line_of
from deepcompile_zero3.transport.rank_names import rank_names

_WHAT = "stream_full_parameters"


@torch_internals.disable_dynamo
def stream_full_parameters(
    model: nn.Module,
    *,
    max_mb: float = 128,
    dtype: torch.dtype | None = None,
    to: Literal["all"] | int | SharedMemorySender = "all",
    buffers: bool = False,
    group: dist.ProcessGroup | None = None,
    transport: TransportName = "auto",
) -> "ParameterStream":
    """Iterates over the full parameters of a sharded model, gathered in buckets. Collective.

    ::

        for name, tensor in stream_full_parameters(model, dtype=torch.bfloat16, to=0):
            if tensor is not None:
                engine.load_weights([(name, tensor)])

    All ranks call it and iterate to the end, whoever gets tensors. Parameters come in the order of
    ``model.named_parameters()``; a tied one comes once, under its first name, as FSDP2's users and
    ``save_pretrained`` have it. Values are those of ``parameter.full_tensor()``, to the bit: master
    weights, whatever ``MixedPrecisionPolicy`` or quantized gathers compute with. One bucket travels
    while the consumer works on another.

    Beyond the shards, a rank that gets tensors needs at most twice ``max_mb``, in three parts: the
    bucket at work, the one that travels, and the one of which the loop still names a tensor. A
    tensor larger than two thirds of ``max_mb`` is a bucket of its own, and counts as ``max_mb``
    where it is larger than that. Ranks of one host share this memory, and write their parts to it.
    Otherwise they exchange messages, and ranks that get nothing need no more than what they send.

    A tensor may be kept for as long as it is needed. In shared memory it keeps its whole bucket
    (``clone()`` what you keep), and is the same memory on all ranks: do not write to it. Do not
    change the model in the loop.

    A consumer may leave the loop early if all ranks leave it in the same bucket. If only some do,
    or one raises or dies, the others raise before their next bucket, and leaving waits until they
    come there. A rank that keeps the stream in a variable ends it by ``close()``, or a ``with``
    block around the loop.

    Args:
        model: a model with any layouts: rows or other dimensions of ZeRO-3, tensor parallelism,
            replicas, owners, shards that are offloaded, and parameters that are not sharded.
            Values of these and of buffers are the first rank's.
        max_mb: half of the memory that the stream may take, in MiB.
        dtype: a floating dtype to which floating tensors are cast before they travel, or None for
            their own.
        to: the ranks that get tensors: ``"all"``, or one rank of ``group``, where the others get
            ``(name, None)``; or a receiver outside of the job, where all ranks do.
        buffers: whether persistent buffers follow the parameters, by ``model.named_buffers()``.
        group: process group of all ranks that share the model; None means all ranks of the job.
        transport: ``"shared_memory"`` among ranks of one host that compute on its CPU, ``"c10d"``
            messages, or ``"auto"``: the first if it is possible.

    Returns:
        An iterator over ``(name, tensor)``. Tensors have full shapes, and are on the device of the
        model's mesh.

    Raises:
        ValueError, TypeError: an argument is wrong.
        Zero3Error: on all ranks: they disagree on model or arguments; a parameter is a tensor
            subclass, on the meta device, or placed as a partial sum; ``"shared_memory"`` is not
            possible. In the loop: a rank has left it or died, or the receiver has. The message
            names the rank and the parameter.
    """
    max_bytes = check_megabytes("max_mb", max_mb)
    check_dtype_argument(dtype)
    check_bool("buffers", buffers)
    ranks = group_of_ranks(_WHAT, group)
    if not isinstance(to, SharedMemorySender) and to != "all":
        if not isinstance(to, int) or isinstance(to, bool):
            raise TypeError(f'to is "all", a rank or a SharedMemorySender, got {to!r}')
        if to not in range(dist.get_world_size(ranks)):
            raise ValueError(f"to={to}, and the group has {dist.get_world_size(ranks)} ranks")
    arguments = [max_mb, str(dtype), repr(to), buffers, resolve(transport)]
    with torch.no_grad():
        entries = entries_of(_WHAT, model, ranks, dtype=dtype, buffers=buffers, arguments=arguments)
    destination = 0 if isinstance(to, SharedMemorySender) else None if to == "all" else int(to)
    is_read_outside = isinstance(to, SharedMemorySender)
    carrier = _carrier(model, ranks, destination, is_read_outside, resolve(transport))
    buckets = buckets_of(entries, max_bytes, carrier.most_bytes)
    steps = _Steps(ranks, buckets, carrier, to)
    return ParameterStream(steps)


class ParameterStream(Iterator[tuple[str, torch.Tensor | None]]):
    """A stream of full parameters: see :func:`stream_full_parameters`."""

    def __init__(self, steps: "_Steps") -> None:
        self._steps = steps
        # Refers to the steps and not to this object, which ends with the consumer's loop.
        self._iterator = steps.run()
        self._process = os.getpid()

    def __next__(self) -> tuple[str, torch.Tensor | None]:
        """Returns the next name and tensor. Collective where a bucket begins."""
        try:
            return next(self._iterator)
        except StopIteration:
            raise
        except BaseException as error:
            self._steps.stop(line_of(error))
            raise

    def close(self) -> None:
        """Leaves the stream. Waits for the other ranks to come to their next bucket."""
        self._stop(f"its consumer left the loop, or raised, at {self._steps.last}")

    def _stop(self, why: str) -> None:
        self._iterator.close()
        self._steps.stop(why)

    def __enter__(self) -> "ParameterStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._stop(f"its consumer raised at {self._steps.last}: {line_of(error)}")
        self.close()

    def __del__(self) -> None:
        # A child that was forked would speak to the ranks, and to the receiver, for its parent.
        is_here = os.getpid() == self._process
        if is_here and not sys.is_finalizing() and dist.is_initialized():
            with contextlib.suppress(Exception):
                self.close()


class _Steps:
    """The steps of a stream, which all ranks take together.

    Attributes:
        last: the parameter that the consumer has got last, for messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        buckets: Sequence[Bucket],
        carrier: Carrier,
        to: Literal["all"] | int | SharedMemorySender,
    ) -> None:
        self.last = "its beginning"
        self._group = group
        self._buckets = buckets
        self._carrier = carrier
        self._to = to
        self._position = 0  # index of the bucket that comes next
        self._is_over = False
        self._outside: _Outside | None = None

    def run(self) -> Generator[tuple[str, torch.Tensor | None], None, None]:
        """Yields names and tensors."""
        if isinstance(self._to, SharedMemorySender):
            self._agree()  # a rank that leaves would not come to the next call
            self._outside = self._connect(self._to)
        started = 0
        for index, bucket in enumerate(self._buckets):
            self._position = index
            if started == index:
                self._agree()
                self._start(index)
                started += 1
            self._agree()
            self._position = index + 1
            try:
                tensors = self._finish(bucket)
            finally:  # also if this rank raises: the others wait for its part of the next bucket
                ahead = self._buckets[max(index - 1, 0) : index + 2]
                if index + 1 < len(self._buckets) and self._carrier.has_room(ahead):
                    self._start(index + 1)
                    started += 1
            for entry in bucket.entries:
                self.last = f"'{entry.name}'"
                yield entry.name, None if tensors is None else tensors.pop(0)
            if self._outside is not None:
                self._outside.wait(bucket)
        self._agree()
        self._end("")

    @torch.no_grad()
    def _start(self, index: int) -> None:
        self._carrier.start(self._buckets[index])

    @torch.no_grad()
    def _finish(self, bucket: Bucket) -> list[torch.Tensor] | None:
        tensors = self._carrier.finish()
        if isinstance(self._to, SharedMemorySender):
            if self._outside is not None:
                self._outside.send(bucket, tensors)
            return None
        return tensors

    def _connect(self, to: SharedMemorySender) -> "_Outside | None":
        is_first = dist.get_rank(self._group) == 0
        return on_each_rank(
            _WHAT, lambda: _Outside(to, self._carrier) if is_first else None, self._group
        )

    def _agree(self, stopped: str = "") -> None:
        """Tells all ranks that this one goes on, or why it does not. Collective.

        Raises:
            Zero3Error: another rank does not go on.
        """
        at_end = self._position == len(self._buckets)
        position = "the end" if at_end else f"'{self._buckets[self._position].entries[0].name}'"
        held = self._outside.held if self._outside is not None else set()
        try:
            said = self._carrier.agree(f"{_WHAT}: before {position}", stopped, held)
        except BaseException as error:
            self._end(f"{_WHAT}: the ranks of the job lost each other before {position}")
            if isinstance(error, Zero3Error):
                raise Zero3Error(
                    f"{_WHAT} ended before {position}: {error}. If a rank left its loop by an "
                    "error, and kept the stream: use it in a with block"
                ) from error
            raise
        stops = [(rank, why) for rank, why in enumerate(said) if why]
        if stops:
            rank, why = stops[0]
            name = rank_names(self._group)[rank]
            text = f"{_WHAT} ended before {position}: rank {name}: {why}"
            self._end(text)
            if not stopped:
                raise Zero3Error(
                    f"{text}; read that rank's output. All ranks iterate to the end, or leave in "
                    "the same bucket"
                )

    def stop(self, why: str) -> None:
        """Tells all ranks that this one does not go on, unless the stream is over."""
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(Zero3Error):
                self._agree(why)

    def _end(self, error: str) -> None:
        """Frees what the stream has, and tells a receiver how it ended."""
        self._is_over = True
        if self._outside is not None:
            self._outside.close(error)
        with contextlib.suppress(RuntimeError):  # of a rank that died
            self._carrier.close(is_complete=not error)


class _Outside:
    """Rank 0's part of a stream to a receiver outside of the job."""

    def __init__(self, to: SharedMemorySender, carrier: Carrier) -> None:
        self._carrier = carrier
        self._own: Segments | None = None  # for tensors that came by messages
        if not isinstance(carrier, BySharedMemory):
            self._own = Segments(_WHAT, None)
        segments = carrier.segments if isinstance(carrier, BySharedMemory) else self._own
        assert segments is not None
        self._connection = Connection(to, segments)

    @property
    def held(self) -> set[int]:
        """Segments of the ranks that the receiver uses."""
        return self._connection.held if self._own is None else set()

    def send(self, bucket: Bucket, tensors: list[torch.Tensor] | None) -> None:
        """Lets the receiver read a bucket."""
        if isinstance(self._carrier, BySharedMemory):
            self._connection.send(bucket, self._carrier.latest)
            return
        assert self._own is not None
        assert tensors is not None
        number = self._own.take(bucket.nbytes, self._connection.held, bucket.largest)
        for place, tensor in zip(
            bucket.tensors_in(self._own[number].lease()), tensors, strict=True
        ):
            place.copy_(tensor)
        self._connection.send(bucket, number)

    def wait(self, bucket: Bucket) -> None:
        """Waits until the receiver is done with a bucket."""
        self._connection.wait(bucket)

    def close(self, error: str) -> None:
        """Ends the stream, with an error for the receiver if there is one."""
        self._connection.close(error)
        if self._own is not None:
            self._own.shrink(0)


def _carrier(
    model: nn.Module,
    group: dist.ProcessGroup,
    destination: int | None,
    is_read_outside: bool,
    transport: TransportName,
) -> Carrier:
    """Returns what moves the buckets. Collective."""
    meshes = [t.device_mesh for _, t in named_tensors(model, False) if isinstance(t, DTensor)]
    device = torch.device(meshes[0].device_type if meshes else "cpu")
    rank = dist.get_rank(group)
    why = "" if device.type == "cpu" else f"the mesh is on {device}"
    if transport in ("auto", "shared_memory"):
        try:
            if not why:
                memory = take_memory(_WHAT, group)
                return BySharedMemory(memory, rank, destination, is_read_outside)
        except NoSharedMemory as error:
            why = str(error)
        if transport == "shared_memory":
            raise Zero3Error(f"{_WHAT}: transport='shared_memory' is not possible: {why}")
    if device.type != "cpu":
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return ByMessages(group, device, destination)
