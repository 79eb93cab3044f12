"""ServerCalls: requests to other models and their responses, for models that call the engine's model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from manylora.errors import RequestCancelledError, RequestError, UnavailableError
from manylora.wire.bls import Values

STATUSES = ((UnavailableError, "UNAVAILABLE"), (RequestCancelledError, "CANCELLED"))
"""Errors with their own Triton status. All others are INTERNAL."""
KEPT_S = 1.0  # how long a call's responses are kept after its end


class ServerCalls:
    """pb_utils: triton_python_backend_utils, which only models can import.

    streams: whether the model itself may return several responses; then called models may, too.
    """

    def __init__(self, pb_utils: Any, streams: bool = True) -> None:
        self._pb_utils, self._streams = pb_utils, streams
        self._lock = threading.Lock()
        self._ended: deque[tuple[float, Any]] = deque()  # end time, and the responses

    def call(
        self, model: str, inputs: Values, outputs: Sequence[str], request_id: str = ""
    ) -> Iterator[Mapping[str, Any]]:
        """As `CallModel`."""
        request = self._pb_utils.InferenceRequest(
            model_name=model,
            inputs=self._tensors(inputs),
            requested_output_names=outputs,
            request_id=request_id,
        )
        streams = self._streams and request_id
        responses = request.exec(decoupled=True) if streams else [request.exec()]
        try:
            for response in responses:
                if response.has_error():
                    error = response.error()
                    kind = (
                        UnavailableError
                        if error.code() == self._pb_utils.TritonError.UNAVAILABLE
                        else RequestError
                    )
                    raise kind(error.message())
                tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
                if tensors:
                    yield tensors
        finally:
            if streams:
                self._keep(responses)

    def _keep(self, responses: Any) -> None:
        """Keep a call's responses alive for a while, and free them here. Thread-safe.

        The stub releases them on a thread that runs concurrently with Python code. If that were the last
        reference, they would be freed there, which occasionally crashes the process.
        """
        now, old = time.monotonic(), []
        with self._lock:
            self._ended.append((now, responses))
            while self._ended and now - self._ended[0][0] > KEPT_S:
                old.append(self._ended.popleft())

    def respond(self, outputs: Values) -> Any:
        return self._pb_utils.InferenceResponse(self._tensors(outputs))

    def fail(self, error: Exception) -> Any:
        kinds = self._pb_utils.TritonError
        code = next(
            (getattr(kinds, name) for kind, name in STATUSES if isinstance(error, kind)), kinds.INTERNAL
        )
        return self._pb_utils.InferenceResponse(error=kinds(str(error), code))

    def _tensors(self, values: Values) -> list[Any]:
        """An array becomes a tensor. A tensor of the server's is passed through."""
        make = self._pb_utils.Tensor
        return [make(name, one) if isinstance(one, np.ndarray) else one for name, one in values.items()]
