"""Channel: messages over a socket, each with a name and values; arrays among these as their bytes.
Collectives: communication within a forward pass.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from manylora.ranks.mapping import Mapping

HEAD = struct.Struct("<Q")
MAX_HEADER = 2**26  # bytes
ARRAY = "ndarray"  # key of an array's dtype and shape in a header; its bytes follow


class ChannelClosedError(ConnectionError):
    """The other end has closed the channel."""


@dataclass(frozen=True)
class Message:
    """what: its name. values: JSON-serialisable, but for arrays."""

    what: str
    values: dict[str, Any] = field(default_factory=dict)


class Channel:
    """Any thread may send, one thread receives. Raises ChannelClosedError if the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        arrays: list[np.ndarray] = []

        def put(array: np.ndarray) -> dict[str, Any]:
            arrays.append(np.ascontiguousarray(array))
            return {ARRAY: (array.dtype.str, array.shape)}

        header = json.dumps([message.what, message.values], separators=(",", ":"), default=put).encode()
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
        arrays: list[np.ndarray] = []

        def make(found: dict[str, Any]) -> Any:
            if ARRAY not in found:
                return found
            kind, shape = found[ARRAY]
            arrays.append(np.empty(shape, kind))
            return arrays[-1]

        message = Message(*json.loads(bytes(self._take(size)), object_hook=make))
        for array in arrays:  # in the order of the header, as they were sent
            if array.size:
                self._fill(memoryview(array.reshape(-1).view(np.uint8).data))
        return message

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


class Collectives:
    """Uses torch's process group. All ranks of a stage call the same operations in the same order."""

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self.mapping, self._device = mapping, device
        self._size = mapping.tp_size
        stages = [mapping.at(stage * mapping.tp_size).tp_group for stage in range(mapping.pp_size)]
        groups = [dist.new_group(ranks) for ranks in stages]
        self._group = groups[mapping.pp_rank]
        self._leader = mapping.tp_group[0]

    def sum(self, x: Tensor) -> Tensor:
        """Over this stage's ranks, in rank order. All-reduce's order depends on the rows beside one."""
        if self._size == 1:
            return x
        parts = torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_single(parts.view(-1), x.contiguous().view(-1), self._group)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """x of each rank in this stage, on its first rank; None on others. Equal shapes on all ranks."""
        if self._size == 1:
            return [x]
        x = x.contiguous()
        leads = self.mapping.tp_rank == 0
        parts = [torch.empty_like(x) for _ in range(self._size)] if leads else None
        dist.gather(x, parts, self._leader, self._group)
        return parts

    def send_hidden(self, x: Tensor) -> None:
        dist.send(x.contiguous(), self.mapping.rank + self._size)

    def receive_hidden(self, x: Tensor) -> Tensor:
        """Receive into x from the rank with the same part in the previous stage. Returns x."""
        dist.recv(x, self.mapping.rank - self._size)
        return x

    def from_last(self, x: Tensor) -> Tensor:
        """x of the rank with the same part in the last stage, received into x on other ranks. Returns x."""
        mapping = self.mapping
        last = mapping.world_size - self._size + mapping.tp_rank
        if not mapping.is_last_stage:
            dist.recv(x, last)
            return x
        x = x.contiguous()
        for rank in range(mapping.tp_rank, last, self._size):
            dist.send(x, rank)
        return x

    def send_back(self, x: Tensor) -> None:
        """Send logits or hidden states to rank 0, from the first rank of the last stage."""
        dist.send(x.contiguous(), 0)

    def receive_back(self, x: Tensor) -> Tensor:
        """Receive into x, on rank 0. Returns x."""
        mapping = self.mapping
        dist.recv(x, (mapping.pp_size - 1) * mapping.tp_size)
        return x

    def least(self, number: int) -> int:
        given = torch.tensor([number], device=self._device)
        dist.all_reduce(given, dist.ReduceOp.MIN)
        return int(given)
