"""Channel: messages over a socket, each with a name, plain values and arrays, sent as their bytes."""

from __future__ import annotations

import errno
import json
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HEAD = struct.Struct("<Q")
MAX_HEADER = 2**26  # bytes


class ChannelClosedError(ConnectionError):
    """The other end has closed the channel."""


@dataclass(frozen=True)
class Message:
    """what: its name. values: JSON-serialisable."""

    what: str
    values: dict[str, Any] = field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()


class Channel:
    """Any thread may send, one thread receives. Raises ChannelClosedError if the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        arrays = [np.ascontiguousarray(array) for array in message.arrays]
        shapes = [(array.dtype.str, array.shape) for array in arrays]
        header = json.dumps([message.what, message.values, shapes], separators=(",", ":")).encode()
        parts = [HEAD.pack(len(header)) + header]
        parts += [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]  # type: ignore[misc]
        try:
            with self._sending:
                for part in parts:
                    self._socket.sendall(part)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> Message:
        """Wait for the next message, forever or as set by `set_timeout`; then raises TimeoutError."""
        (size,) = HEAD.unpack(self._take(HEAD.size))
        if size > MAX_HEADER:
            raise ChannelClosedError(f"a header of {size} bytes")
        what, values, shapes = json.loads(bytes(self._take(size)))
        return Message(what, values, [self._array(np.dtype(kind), shape) for kind, shape in shapes])

    def set_timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def is_closed(self) -> bool:
        """Whether the other end is gone and nothing is left. Only while nobody receives."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Idempotent. The other end notices at once, even if a child process has inherited the socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _array(self, kind: np.dtype, shape: list[int]) -> np.ndarray:
        made = np.empty(shape, kind)
        if made.size:
            self._fill(memoryview(made.reshape(-1).view(np.uint8).data))
        return made

    def _take(self, size: int) -> bytearray:
        made = bytearray(size)
        self._fill(memoryview(made))
        return made

    def _fill(self, place: memoryview) -> None:
        while place:
            try:
                count = self._socket.recv_into(place)
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
                    raise  # from `set_timeout`; the system's timeout means that the other host is gone
                raise ChannelClosedError(str(error)) from error
            if not count:
                raise ChannelClosedError("the other end closed")
            place = place[count:]
