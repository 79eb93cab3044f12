"""The parts of the Python backend's objects that this package uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL: the flag of a request's last response."""

Arrays = Mapping[str, np.ndarray]
"""Tensors by name, each with its leading batch dimension."""


class ServerResponse(Protocol):
    """The backend's InferenceResponse. Only models can create one."""

    def output_tensors(self) -> Sequence[object]: ...


Response = TypeVar("Response", bound=ServerResponse)

Sent = TypeVar("Sent", contravariant=True)


class ServerTensor(Protocol):
    def name(self) -> str: ...
    def shape(self) -> Sequence[int]: ...
    def as_numpy(self) -> np.ndarray: ...


class ResponseSender(Protocol[Sent]):
    """Takes the responses to one request. Thread-safe."""

    def send(self, response: Sent | None = None, flags: int = 0) -> None: ...
    def is_cancelled(self) -> bool: ...


class ServerRequest(Protocol[Sent]):
    def request_id(self) -> str: ...
    def parameters(self) -> str: ...
    def inputs(self) -> Sequence[ServerTensor]: ...
    def get_response_sender(self) -> ResponseSender[Sent]: ...
    def is_cancelled(self) -> bool: ...
