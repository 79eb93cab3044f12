"""Requests and responses as Triton's binding has them: sending drops outputs that the client has not asked
for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from manylora.doors.triton.server_types import FINAL


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.as_numpy, self.shape = (lambda: name), (lambda: array), (lambda: list(array.shape))


class Output:
    """An output tensor."""


class ServerResponse:
    """content: for the test. Nobody but the binding has the tensors, and no client asks for the last one."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self._outputs = [Output(), Output()]

    def output_tensors(self) -> list[Output]:
        return list(self._outputs)

    def drop_unwanted(self) -> None:
        """To be called by `send`. The binding does this without Python's lock, so nothing may be freed."""
        dropped = weakref.ref(self._outputs.pop())
        assert dropped() is not None


class Client:
    """A request as Triton hands it over, and its sender. bad: the response that cannot be sent.
    sent: contents of the responses. cancelled: what the server says of it.
    """

    def __init__(self, arrays: Mapping[str, Any], bad: int | None = None, parameters: str = "{}") -> None:
        self._arrays, self._bad, self._parameters = arrays, bad, parameters
        self.sent: list[Any] = []
        self.done = threading.Event()
        self.cancelled: bool | Exception = False

    def request_id(self) -> str:
        return "same"

    def parameters(self) -> str:
        return self._parameters

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, np.asarray(value)) for name, value in self._arrays.items()]

    def get_response_sender(self) -> Client:
        return self

    def is_cancelled(self) -> bool:
        assert not self.done.is_set()  # the server ends when it is asked then
        if isinstance(self.cancelled, Exception):
            raise self.cancelled
        return self.cancelled

    def send(self, response: Any = None, flags: int = 0) -> None:
        if len(self.sent) == self._bad:
            self._bad = None
            raise RuntimeError("no shared memory is left")
        if response is not None:
            response.drop_unwanted()
            response = response.content
        self.sent.append(response)
        if flags == FINAL:
            self.done.set()


def fail(error: Exception) -> ServerResponse:
    return ServerResponse(str(error))
