"""OpenCalls: the requests of Triton that `tensorrt_llm` has not answered yet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic

import numpy as np

from manylora.wire.server_types import Response, ResponseSender


@dataclass(eq=False)
class TritonCall(Generic[Response]):
    """One request of Triton's, whose items are requests to the engine.

    request_id: the client's own; may be empty or repeated.
    number: [1, 1] int64, of this call alone; it goes to postprocessing, and comes back when a client left.
    tickets: of all requests to the engine. open: how many of these have not ended.
    started: whether a response was sent. done: whether the final one was.
    """

    request_id: str
    sender: ResponseSender[Response]
    number: np.ndarray
    tickets: list[int] = field(default_factory=list)
    open: int = 0
    started: bool = False
    done: bool = False


class OpenCalls(Generic[Response]):
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._calls: set[TritonCall[Response]] = set()
        self._by_id: dict[str, set[TritonCall[Response]]] = {}
        self._unchecked: list[TritonCall[Response]] = []  # of the present round of `next_to_check`

    def __len__(self) -> int:
        return len(self._calls)

    def new(self, request_id: str, sender: ResponseSender[Response]) -> TritonCall[Response]:
        """Not open yet: one that is refused never is."""
        return TritonCall(request_id, sender, np.array([[next(self._numbers)]], np.int64))

    def add(self, call: TritonCall[Response]) -> None:
        with self._lock:
            self._calls.add(call)
            self._by_id.setdefault(call.request_id, set()).add(call)

    def discard(self, call: TritonCall[Response]) -> None:
        with self._lock:
            self._calls.discard(call)
            same = self._by_id.get(call.request_id, set())
            same.discard(call)
            if not same:
                self._by_id.pop(call.request_id, None)

    def with_id(self, request_id: str) -> Sequence[TritonCall[Response]]:
        with self._lock:
            return list(self._by_id.get(request_id, ()))

    def with_number(self, number: int) -> Sequence[TritonCall[Response]]:
        with self._lock:
            return [call for call in self._calls if call.number.item() == number]

    def next_to_check(self, most: int) -> Sequence[TritonCall[Response]]:
        """At most so many, others with the next calls, until each had its turn. For one thread."""
        if not self._unchecked:
            with self._lock:
                self._unchecked = list(self._calls)
        chosen, self._unchecked = self._unchecked[:most], self._unchecked[most:]
        return [call for call in chosen if not call.done]
