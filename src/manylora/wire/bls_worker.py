"""BlsWorker: answers requests of models that call the engine's model, such as `tensorrt_llm_bls`, on threads,
and ends abandoned ones.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Protocol

from manylora.system.compiler import Source, load_library
from manylora.system.lifeline import Lifeline
from manylora.wire.bls import ClientRequest, Values
from manylora.wire.client_errors import client_error, client_message
from manylora.wire.server_types import FINAL, Response, ResponseSender, ServerRequest, send

logger = logging.getLogger("manylora")

STUB = "triton_python_backend_stub"
SOURCE = Source("lock_guard", (Path(__file__).with_name("lock_guard.c"),))
OF_PYTHON = (
    "_PyThreadState_UncheckedGet", "PyGILState_GetThisThreadState", "PyEval_SaveThread",
    "PyEval_RestoreThread",
)  # fmt: skip


def share_lock() -> None:
    """Keep Triton's stub from deadlocking when several threads read streams of another model. Without a
    compiler nothing changes, and the launcher restarts a server with a blocked process.

    A thread that takes a response from a stream waits for the GIL while it holds the stream's mutex. The
    stub's own thread, which delivers the next response, waits for that mutex while it holds the mutex of
    all streams. A thread that opens a stream waits for the latter while it holds the GIL. This is a
    deadlock. With this a thread that has to wait for a mutex of the stub releases the GIL meanwhile.
    """
    if not _is_stub():
        return
    try:
        library = load()
        if library is not None and not library.install():
            logger.warning("%s has another form than is known: its mutexes are as they were", STUB)
    except (AttributeError, OSError, subprocess.SubprocessError) as error:
        logger.warning("mutexes of %s are as they were: %s", STUB, error)


def load() -> ctypes.CDLL | None:
    """lock_guard.c; None without a compiler. Raises OSError, subprocess.SubprocessError, and AttributeError
    if Python lacks a function.
    """
    library = load_library(SOURCE)
    if library is None:
        return None
    library.set_python(*(ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in OF_PYTHON))
    return library


def _is_stub() -> bool:
    try:
        return Path("/proc/self/exe").readlink().name == STUB
    except OSError:
        return False


THREADS = 64
PERIOD_S = 0.1  # between checks for disconnected clients


class LastOutputs(dict[str, Any]):
    """Outputs of a response that is known to be the last one. It is sent with the final flag."""


class Generator(Protocol):
    """Answers requests by calling the engine's model."""

    def answer(self, client: ClientRequest, request: ServerRequest[Any]) -> Iterator[Values]:
        """Outputs of each response, as they arrive; none after LastOutputs. Raises RequestError."""

    def stop(self, model: str, request_id: str) -> None:
        """Stop a request to an engine's model."""


class BlsWorker(Generic[Response]):
    """name: the model's, for the log. lifeline: gets the number of open requests.

    decoupled: any number of responses per request; otherwise only the first is sent. respond: converts
    outputs to a response. fail: converts an error to one. before: called before each response, on the sending
    thread, which is the only one that may write metrics.

    All threads continue when a request fails. If a response cannot be sent, its request ends, and the engine
    stops generating for it.
    """

    def __init__(
        self,
        name: str,
        lifeline: Lifeline,
        generator: Generator,
        decoupled: bool,
        respond: Callable[[Values], Response],
        fail: Callable[[Exception], Response],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        share_lock()
        self._name, self._lifeline = name, lifeline
        self._generator, self._decoupled = generator, decoupled
        self._respond, self._fail, self._before = respond, fail, before
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="manylora-bls")
        # (client, sender, response, flags)
        self._outbox: queue.SimpleQueue[
            tuple[ClientRequest, ResponseSender[Response], Response | None, int] | None
        ] = queue.SimpleQueue()
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

    def execute(self, requests: Sequence[ServerRequest[Response]]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            self._pool.submit(self._answer, request, sender, self._begin(sender.is_cancelled))

    def close(self) -> None:
        """Afterwards no thread runs here: releasing a metric too late would crash the process."""
        self._pool.shutdown(wait=True)
        self._closing.set()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()

    def _begin(self, is_cancelled: Callable[[], bool]) -> ClientRequest:
        client = ClientRequest(is_cancelled)
        with self._lock:
            self._clients.add(client)
        return client

    def _end(self, client: ClientRequest) -> None:
        with self._lock:
            self._clients.discard(client)
        client.finish()

    def _answer(
        self, request: ServerRequest[Response], sender: ResponseSender[Response], client: ClientRequest
    ) -> None:
        with self._lifeline.busy():
            last: Response | None = None
            try:
                answers = self._generator.answer(client, request)
                if not self._decoupled:
                    [first, *_] = list(answers)
                    answers = iter([LastOutputs(first)])
                for outputs in answers:
                    if isinstance(outputs, LastOutputs):
                        last = self._respond(outputs)
                        break
                    self._outbox.put((client, sender, self._respond(outputs), 0))
            except Exception as error:
                last = self._fail(client_error(error, self._name))
            self._end(client)
            self._outbox.put((client, sender, last, FINAL))

    def _send_all(self) -> None:
        failures: dict[ClientRequest, Exception] = {}
        while (item := self._outbox.get()) is not None:
            client, sender, response, flags = item
            if client in failures:
                if flags != FINAL:
                    continue
                response = self._fail(failures.pop(client))
            try:
                self._before()
                send(sender, response, flags)
            except Exception as error:
                refusal = client_error(error, self._name)
                if flags != FINAL:
                    failures[client] = refusal
                    client.abandoned = True

    def _watch(self) -> None:
        """Stop the generations of disconnected clients: nothing else tells the engine's model.

        Repeated, because a stop may arrive before the request it is for.
        """
        while not self._closing.wait(PERIOD_S):
            with self._lock:
                clients = list(self._clients)
            for client in clients:
                try:
                    for model, request_id in client.to_stop():
                        self._generator.stop(model, request_id)
                except Exception as error:
                    client_message(error, self._name)  # for the log
