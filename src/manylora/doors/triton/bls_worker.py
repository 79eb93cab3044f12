"""For models that call the engine's model, such as `tensorrt_llm_bls`. BlsWorker: answers their requests on
threads, and ends abandoned ones. ServerCalls: requests to other models and their responses.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from manylora.doors.triton.bls import ClientRequest, Values, stop_request
from manylora.doors.triton.server_types import (
    FINAL,
    Response,
    ResponseSender,
    ServerRequest,
    client_error,
    client_message,
    send,
)
from manylora.errors import RequestCancelledError, RequestError, UnavailableError
from manylora.system.compiler import Source, load_library
from manylora.system.lifeline import Lifeline
from manylora.system.tracing import parent_in

logger = logging.getLogger("manylora")

STUB = "triton_python_backend_stub"
SOURCE = Source("lock_guard", (Path(__file__).with_name("lock_guard.c"),))
OF_PYTHON = (
    "_PyThreadState_UncheckedGet", "PyGILState_GetThisThreadState", "PyEval_SaveThread",
    "PyEval_RestoreThread",
)  # fmt: skip
PARENT: ContextVar[dict[str, str]] = ContextVar("parent", default={})  # noqa: B039 - never changed
"""The span of the client whose request this thread answers, for the models that it calls."""
THREADS = 64
PERIOD_S = 0.1  # between checks for disconnected clients
STATUSES = ((UnavailableError, "UNAVAILABLE"), (RequestCancelledError, "CANCELLED"))
"""Errors with their own Triton status. All others are INTERNAL."""
KEPT_S = 1.0  # how long a call's responses are kept after its end


def share_lock() -> None:
    """Keep Triton's stub from deadlocking when threads read streams of another model, if it can be compiled.

    A thread that takes a response from a stream waits for the GIL while it holds the stream's mutex. The
    stub's own thread, which delivers the next response, waits for that mutex while it holds the mutex of all
    streams. A thread that opens a stream waits for the latter while it holds the GIL. With this a thread that
    has to wait for a mutex of the stub releases the GIL meanwhile.
    """
    try:
        if Path("/proc/self/exe").readlink().name != STUB:
            return
        library = load()
        if library is not None and not library.install():
            logger.warning("%s has another form than is known: its mutexes are as they were", STUB)
    except (AttributeError, OSError, subprocess.SubprocessError) as error:
        logger.warning("mutexes of %s are as they were: %s", STUB, error)


def load() -> ctypes.CDLL | None:
    """lock_guard.c; None without a compiler. Raises OSError, SubprocessError, AttributeError."""
    library = load_library(SOURCE)
    if library is None:
        return None
    library.set_python(*(ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in OF_PYTHON))
    return library


class LastOutputs(dict[str, Any]):
    """Outputs of a response that is known to be the last one. It is sent with the final flag."""


class BlsWorker:
    """name: the model's, for the log. lifeline: gets the number of open requests.
    answer: yields the outputs of each response to a request; none after LastOutputs. decoupled: any number of
    responses per request; otherwise only the first is sent. before: called
    before each response, on the sending thread, which is the only one that may write metrics.

    All threads continue when a request fails. If a response cannot be sent, its generation is stopped.
    """

    def __init__(
        self,
        name: str,
        lifeline: Lifeline,
        answer: Callable[[ClientRequest, ServerRequest], Iterator[Values]],
        decoupled: bool,
        server: ServerCalls,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        share_lock()
        self._name, self._lifeline = name, lifeline
        self._answers, self._decoupled, self._server, self._before = answer, decoupled, server, before
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="manylora-bls")
        # (client, sender, response, flags)
        self._outbox: queue.SimpleQueue[tuple[ClientRequest, ResponseSender, Response | None, int] | None] = (
            queue.SimpleQueue()
        )
        self._clients: set[ClientRequest] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        # Only one thread sends, because the server cannot handle many concurrent senders.
        self._threads = [
            threading.Thread(target=self._watch, name="manylora-watch", daemon=True),
            threading.Thread(target=self._send_all, name="manylora-send", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: Sequence[ServerRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            client = ClientRequest(sender.is_cancelled)
            with self._lock:
                self._clients.add(client)
            self._pool.submit(self._answer, request, sender, client)

    def close(self) -> None:
        """Afterwards no thread runs here: releasing a metric too late would crash the process."""
        self._pool.shutdown(wait=True)
        self._closing.set()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()

    def _answer(self, request: ServerRequest, sender: ResponseSender, client: ClientRequest) -> None:
        with self._lifeline.busy():
            last: Response | None = None
            try:
                PARENT.set(parent_in(request.parameters()))
                answers = self._answers(client, request)
                if not self._decoupled:
                    [first, *_] = list(answers)
                    answers = iter([LastOutputs(first)])
                for outputs in answers:
                    if isinstance(outputs, LastOutputs):
                        last = self._server.respond(outputs)
                        break
                    self._outbox.put((client, sender, self._server.respond(outputs), 0))
            except Exception as error:
                last = self._server.fail(client_error(error, self._name))
            with self._lock:
                self._clients.discard(client)
            client.finish()
            self._outbox.put((client, sender, last, FINAL))

    def _send_all(self) -> None:
        failures: dict[ClientRequest, Exception] = {}
        while (item := self._outbox.get()) is not None:
            client, sender, response, flags = item
            if client in failures:
                if flags != FINAL:
                    continue
                response = self._server.fail(failures.pop(client))
            try:
                self._before()
                send(sender, response, flags)
            except Exception as error:
                refusal = client_error(error, self._name)
                if flags != FINAL:
                    failures[client] = refusal
                    client.abandoned = True

    def _watch(self) -> None:
        """Stop those of disconnected clients, again and again: a stop may arrive before its request."""
        while not self._closing.wait(PERIOD_S):
            with self._lock:
                clients = list(self._clients)
            for client in clients:
                try:
                    for model, request_id in client.to_stop():
                        stop_request(self._server.call, model, request_id)
                except Exception as error:
                    client_message(error, self._name)  # for the log


class ServerCalls:
    """pb_utils: triton_python_backend_utils. streams: whether models may return several responses."""

    def __init__(self, pb_utils: Any, streams: bool = True) -> None:
        self._pb_utils, self._streams = pb_utils, streams
        self._lock = threading.Lock()
        self._ended: deque[tuple[float, Any]] = deque()  # end time, and the responses

    def call(
        self, model: str, inputs: Values, outputs: Sequence[str], request_id: str = ""
    ) -> Iterator[Mapping[str, Any]]:
        """Outputs of each response, as they arrive. request_id: for an engine. Raises RequestError."""
        request = self._pb_utils.InferenceRequest(
            model_name=model,
            inputs=self._tensors(inputs),
            requested_output_names=outputs,
            request_id=request_id,
            **({"parameters": parent} if (parent := PARENT.get()) else {}),
        )
        streams = self._streams and request_id
        responses = request.exec(decoupled=True) if streams else [request.exec()]
        try:
            for response in responses:
                if response.has_error():
                    error, kinds = response.error(), self._pb_utils.TritonError
                    kind = UnavailableError if error.code() == kinds.UNAVAILABLE else RequestError
                    raise kind(error.message())
                tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
                if tensors:
                    yield tensors
        finally:
            if streams:
                self._keep(responses)

    def _keep(self, responses: Any) -> None:
        """Keep a call's responses alive for a while, and free them here. Thread-safe. The stub would free the
        last reference on a thread beside Python code, which occasionally crashes the process.
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
        make = self._pb_utils.Tensor
        return [make(name, one) if isinstance(one, np.ndarray) else one for name, one in values.items()]
