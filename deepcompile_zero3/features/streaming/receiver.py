"""Streams to a process outside of the job, which reads the ranks' shared memory.

The receiver listens on a socket of this host, and rank 0 connects to it for each stream. Over the
socket go the names, dtypes, shapes and places of a bucket's tensors, and once the descriptor of
each segment of memory; the tensors themselves stay where the ranks have written them. If either
side dies, the socket ends, and the other knows at once.
"""

import array
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from deepcompile_zero3.errors import Zero3Error
from deepcompile_zero3.features.streaming.buckets import Bucket, tensor_in
from deepcompile_zero3.features.streaming.segments import Mapping, Segments

_LENGTH = struct.Struct("<I")
_LONGEST_ADDRESS = 108  # bytes, of a socket


@dataclass(frozen=True)
class SharedMemorySender:
    """A value of ``to`` of ``stream_full_parameters``: a receiver outside of the job.

    Attributes:
        name: the name of a :class:`SharedMemoryReceiver` of the same user, on the host of rank 0.
        timeout: seconds to wait for the receiver: until it exists, and for each bucket.
    """

    name: str
    timeout: float = 60.0


class SharedMemoryReceiver:
    """Receives streams of full parameters in a process outside of the job.

    ::

        with SharedMemoryReceiver("policy") as receiver:   # ranks: to=SharedMemorySender("policy")
            while True:
                for name, tensor in receiver:              # one stream
                    weights[name].copy_(tensor)

    Each loop over it is one stream. It yields names and full tensors, in the order of
    ``model.named_parameters()``. Tensors are in memory that ranks write to: do not change them.
    They may be kept, but one tensor keeps its whole bucket. To go to the next bucket tells the
    ranks that this one is done. To leave the loop early ends the stream with an error on the ranks.

    Args:
        name: a name that no other receiver on this host has.
        timeout: seconds to wait for a stream to begin, and for each of its buckets.

    Raises:
        ValueError: the name is too long for the address of a socket.
        Zero3Error: another receiver has the name. In a loop: the ranks do not come, died or raised.
    """

    def __init__(self, name: str, *, timeout: float = 300.0) -> None:
        self._name = name
        self._timeout = timeout
        address = _address(name)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(address)
        except OSError as error:
            self._socket.close()
            raise Zero3Error(
                f"the receiver {name!r} exists already: give each another name ({error})"
            ) from error
        self._socket.listen(1)
        self._socket.settimeout(timeout)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            raise Zero3Error(
                f"no stream has come to the receiver {self._name!r} in {self._timeout} s"
            ) from None
        with connection:
            _check_user(connection)
            connection.settimeout(self._timeout)
            yield from self._stream(connection)

    def _stream(self, connection: socket.socket) -> Iterator[tuple[str, torch.Tensor]]:
        mapped: dict[int, Mapping] = {}
        last = "its beginning"
        while True:
            try:
                message, file = _receive(connection)
            except OSError as error:
                raise Zero3Error(
                    f"the stream to the receiver {self._name!r} ended after {last}: the ranks "
                    f"died, raised or take longer than {self._timeout} s ({error})"
                ) from error
            if message.get("error"):
                raise Zero3Error(message["error"])
            if message.get("end"):
                return
            for number in message["dropped"]:
                mapped.pop(number, None)
            number = message["segment"]
            if file is not None:
                try:
                    mapped[number] = Mapping(file, message["nbytes"])
                finally:
                    os.close(file)
            memory = mapped[number].lease()
            tensors = [
                (name, tensor_in(memory, _dtype(dtype), shape, offset))
                for name, dtype, shape, offset in message["tensors"]
            ]
            del memory
            while tensors:
                last = repr(tensors[0][0])
                yield tensors.pop(0)
            held = [each for each, mapping in mapped.items() if mapping.is_held]
            with contextlib.suppress(OSError):  # the next message tells
                _send(connection, {"held": held})

    def close(self) -> None:
        """Ends listening: the name is free."""
        self._socket.close()

    def __enter__(self) -> "SharedMemoryReceiver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Connection:
    """Rank 0's end of a stream to a receiver.

    Attributes:
        held: segments in which the receiver has tensors, as far as it has told.
    """

    def __init__(self, to: SharedMemorySender, segments: Segments) -> None:
        self.held: set[int] = set()
        self._to = to
        self._segments = segments
        self._known: set[int] = set()  # segments that the receiver has mapped
        address = _address(to.name)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(to.timeout)
        deadline = time.monotonic() + to.timeout
        while True:
            try:
                self._socket.connect(address)
                break
            except (ConnectionRefusedError, BlockingIOError):
                if time.monotonic() > deadline:
                    self._socket.close()
                    raise Zero3Error(
                        f"there is no receiver {to.name!r} on the host of rank 0, nor came one in "
                        f"{to.timeout} s: make a SharedMemoryReceiver({to.name!r}) there first"
                    ) from None
                time.sleep(0.02)
        _check_user(self._socket)

    def send(self, bucket: Bucket, number: int) -> None:
        """Tells the receiver that a segment has a bucket."""
        is_new = number not in self._known
        dropped = self._known - self._segments.files.keys()
        message = {
            "segment": number,
            "nbytes": self._segments[number].nbytes,
            "dropped": sorted(dropped),
            "tensors": [
                [entry.name, str(entry.dtype), list(entry.shape), offset]
                for entry, offset in zip(bucket.entries, bucket.offsets, strict=True)
            ],
        }
        self._known = self._known - dropped | {number}
        file = self._segments.files[number].number if is_new else None
        self._attempt(bucket, lambda: _send(self._socket, message, file))
        self.held = self.held | {number}

    def wait(self, bucket: Bucket) -> None:
        """Waits until the receiver is done with the bucket that was sent last."""
        answer = self._attempt(bucket, lambda: _receive(self._socket)[0])
        self.held = {*answer["held"]}

    def _attempt(self, bucket: Bucket, function: Any) -> Any:
        try:
            return function()
        except TimeoutError:
            why = f"has not taken it in {self._to.timeout} s"
        except (OSError, ValueError) as error:
            why = f"has left or died ({error})"
        raise Zero3Error(
            f"the receiver {self._to.name!r} {why}, at the parameters from "
            f"'{bucket.entries[0].name}' to '{bucket.entries[-1].name}': read its output, and "
            "stream again"
        )

    def close(self, error: str) -> None:
        """Ends the stream, with an error for the receiver if there is one."""
        with contextlib.suppress(OSError), self._socket:
            _send(self._socket, {"error": error} if error else {"end": True})


def _address(name: str) -> str:
    address = f"\0deepcompile_zero3/{os.getuid()}/{name}"  # abstract: no file is left behind
    if (excess := len(address.encode()) - _LONGEST_ADDRESS) > 0:
        raise ValueError(f"the name {name!r} of a receiver is {excess} bytes too long")
    return address


def _check_user(connection: socket.socket) -> None:
    """Raises Zero3Error if the process at the other end is another user's."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", found)
    if user != os.getuid():
        raise Zero3Error(f"the process at the other end is user {user}'s, and not {os.getuid()}'s")


def _send(connection: socket.socket, message: dict[str, Any], file: int | None = None) -> None:
    data = json.dumps(message).encode()
    head = _LENGTH.pack(len(data))
    files = [] if file is None else [file]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([head], rights)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    file = files[0] if files else None
    try:
        head += _exactly(connection, _LENGTH.size - len(head))
        message = json.loads(_exactly(connection, _LENGTH.unpack(head)[0]))
    except BaseException:
        if file is not None:
            os.close(file)
        raise
    return message, file


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = connection.recv(min(nbytes - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("the other end was closed")
        data += part
    return bytes(data)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise Zero3Error(f"this torch has no dtype {name}")
    return dtype
