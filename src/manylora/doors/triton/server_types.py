"""The parts of the Python backend's objects that this package uses, and when they are freed: not while the
server uses them, nor after its memory.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL: the flag of a request's last response."""

Arrays = Mapping[str, np.ndarray]
"""Tensors by name, each with its leading batch dimension."""


Response = Any
"""The backend's InferenceResponse. Only models can create one."""


class ServerTensor(Protocol):
    def name(self) -> str: ...
    def shape(self) -> Sequence[int]: ...
    def as_numpy(self) -> np.ndarray: ...


class ResponseSender(Protocol):
    """Takes the responses to one request. Thread-safe."""

    def send(self, response: Response | None = None, flags: int = 0) -> None: ...
    def is_cancelled(self) -> bool: ...


class ServerRequest(Protocol):
    def request_id(self) -> str: ...
    def parameters(self) -> str: ...
    def inputs(self) -> Sequence[ServerTensor]: ...
    def get_response_sender(self) -> ResponseSender: ...
    def is_cancelled(self) -> bool: ...


def send(sender: ResponseSender, response: Response | None, flags: int = 0) -> None:
    """As the sender's own `send`. response: None only with the flag FINAL. Thread-safe.

    The binding sends without the GIL, and drops outputs that the client did not request. Freeing their arrays
    then, concurrently with Python code, occasionally crashes the process later.
    """
    if response is None:
        sender.send(flags=flags)
        return
    kept = response.output_tensors()
    sender.send(response, flags)
    del kept  # only now


def release(model: object) -> None:
    """Frees what a model refers to, at the end of its `finalize`: tensors, requests and metrics, which are in
    the server's shared memory. When the interpreter ends, that is gone, and freeing them would crash the
    process.
    """
    vars(model).clear()
    gc.collect()
