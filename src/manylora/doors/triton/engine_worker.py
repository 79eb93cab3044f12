"""EngineWorker: passes requests of `tensorrt_llm` to the engine, and its events to responses."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manylora.config.repository import flag, logits_dtype, milliseconds, parameters_of, value_of
from manylora.doors.triton.codec import Item, ResponseEncoder, adapter_told, decode_requests, merge_waiting
from manylora.doors.triton.server_types import (
    FINAL,
    Arrays,
    Response,
    ResponseSender,
    ServerRequest,
    check_parameters,
    client_error,
    send,
)
from manylora.doors.triton.shape_guard import read_inputs
from manylora.errors import DrainingError, RequestError
from manylora.request import Event, FinishReason, LoraInput
from manylora.system.lifeline import RUN_DIR, Lifeline
from manylora.system.tracing import Tracer, open_tracer, parent_in

if TYPE_CHECKING:
    from manylora.engine.loop import EngineLoop


NUMBER = "REQUEST_NUMBER"  # input of postprocessing
SOCKET = "disconnects"
PERIOD_S = 0.005  # a check is a round trip to the server
NAME = "tensorrt_llm"
STALLED_S = 5.0  # without progress, the engine's thread counts as busy even without requests
LAST_RESPONSES_S = 5.0  # to send responses to open requests after the engine ended
SENT_S = 0.5  # for the last response to reach the server
# A check whether a request was cancelled is a round trip to the server, during which responses wait.
CHECKS_AT_ONCE = 16
UNREAD = LoraInput(None)  # for requests refused before their adapter is known

logger = logging.getLogger("manylora")

Outputs = Sequence[tuple[str, np.ndarray]]


class DisconnectReporter:
    """For postprocessing: tells the engine's model which clients of the ensemble have left, with a launcher.

    Triton marks only steps that start afterwards as cancelled, which in a stream are postprocessing's. It
    checks some of its requests, and sends their number as a datagram through the launcher's run directory. A
    lost one is sent again with the stream's next tokens.
    """

    def __init__(self) -> None:
        self._path = _path()
        self._asked = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def check_one(self, requests: Sequence[ServerRequest]) -> None:
        """Check whether one of these requests was cancelled, unless another check was made a moment ago."""
        now = time.monotonic()
        if self._path is None or now - self._asked < PERIOD_S:
            return
        self._asked = now
        request = requests[int(now * 1e6) % len(requests)]
        for tensor in request.inputs():
            if tensor.name() == NUMBER and request.is_cancelled():
                with suppress(OSError):
                    self._socket.sendto(b"%d" % tensor.as_numpy().reshape(-1)[0], str(self._path))


def listen(disconnected: Callable[[int], None]) -> None:
    """disconnected: called on a thread with the number of a request whose client has left; may repeat."""
    path = _path()
    if path is None:
        return
    path.unlink(missing_ok=True)
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(str(path))

    def receive() -> None:
        while True:
            disconnected(int(receiver.recv(32)))

    threading.Thread(target=receive, name="manylora-disconnects", daemon=True).start()


def _path() -> Path | None:
    folder = os.environ.get(RUN_DIR)
    return Path(folder) / SOCKET if folder else None


@dataclass(frozen=True)
class EngineModelOptions:
    """Parameters of the model other than the engine's. Periods in seconds."""

    decoupled: bool
    exclude_input: bool
    logits_dtype: str
    cancellation_period: float
    stats_period: float
    tells_adapter: bool = False  # tell postprocessing the adapter, as it may have a tokenizer

    @classmethod
    def of(cls, model_config: str, decoupled: bool) -> EngineModelOptions:
        """model_config: JSON, as given by Triton. Raises ConfigError, ValueError."""
        parameters, config = parameters_of(model_config), json.loads(model_config)
        return cls(
            decoupled=decoupled,
            exclude_input=flag(parameters, "exclude_input_in_output", False),
            logits_dtype=logits_dtype(config),
            cancellation_period=min(milliseconds(parameters, "cancellation_check_period_ms", 100), 1.0),
            stats_period=milliseconds(parameters, "stats_check_period_ms", 100),
            tells_adapter=value_of(parameters, "lora_trust") is not None,
        )


@dataclass(eq=False)
class TritonCall:
    """One request from Triton, whose items are requests to the engine.

    request_id: the client's own; may be empty or repeated. number: [1, 1] int64, unique; see
    DisconnectReporter. tickets: of the requests to the engine, of which `open` have not ended. started, done:
    whether a response, or the final one, was sent.
    """

    request_id: str
    sender: ResponseSender
    number: np.ndarray
    parent: Mapping[str, str] = field(default_factory=dict)  # HEADERS of a trace
    arrived: float = field(default_factory=time.monotonic)
    tickets: list[int] = field(default_factory=list)
    open: int = 0
    started: bool = False
    done: bool = False


class EngineWorker:
    """lifeline: gets the number of open requests and the engine's progress. metrics: model_repo's
    Exporter. respond, fail: make a response. read_bfloat16: reads a tensor of this type, which NumPy lacks.
    """

    def __init__(
        self,
        engine: EngineLoop,
        options: EngineModelOptions,
        lifeline: Lifeline,
        metrics: Any,
        respond: Callable[[Outputs], Response],
        fail: Callable[[Exception], Response],
        read_bfloat16: Callable[[Any], np.ndarray] | None = None,
    ) -> None:
        self._engine, self._options, self._lifeline, self._metrics = engine, options, lifeline, metrics
        self._respond, self._fail, self._read_bfloat16 = respond, fail, read_bfloat16
        self._tracer = open_tracer()
        self._lock, self._numbers = threading.Lock(), count(1)
        self._calls: set[TritonCall] = set()  # not answered yet
        self._unchecked: list[TritonCall] = []  # in this round of `_cancel_abandoned`
        self._outbox: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        lifeline.activity = self._activity
        self._sender = threading.Thread(target=self._send_all, name="manylora-send", daemon=True)
        self._sender.start()
        # Clients of the ensemble: Triton tells only postprocessing that they have left.
        listen(lambda number: self._cancel_those(lambda call: call.number.item() == number))

    def execute(self, requests: Sequence[ServerRequest]) -> None:
        for request in requests:
            self._take(request)

    def close(self) -> None:
        self._engine.close()
        self._outbox.put(None)
        self._sender.join()
        if self._tracer is not None:
            self._tracer.close()

    def _activity(self) -> tuple[int, int]:
        """Open requests, and engine steps. A thread stuck between requests blocks the next: it is one."""
        return len(self._calls) or int(self._engine.stalled_s > STALLED_S), self._engine.stats().steps

    def _take(self, request: ServerRequest) -> None:
        number = np.array([[next(self._numbers)]], np.int64)
        call = TritonCall(request.request_id(), request.get_response_sender(), number)
        try:
            parameters = request.parameters()
            check_parameters(parameters)
            if self._tracer is not None:
                call.parent = parent_in(parameters)
            arrays = read_inputs(request.inputs(), self._read_bfloat16)
            if "stop" in arrays and np.any(arrays["stop"]):
                if not call.request_id:
                    raise RequestError("Trying to stop a request but request ID is not provided")
                self._cancel_those(lambda one: one.request_id == call.request_id)
                self._outbox.put((call, None, Event(last=True)))
                return
            if self._lifeline.draining:
                raise DrainingError()
            self._submit(call, arrays)
        except Exception as error:
            refusal = client_error(error, NAME)
            self._outbox.put((call, None, Event(finish_reason=FinishReason.ERROR, error=refusal, last=True)))
        if call.done:  # another item of the batch has already failed
            self._cancel(call)

    def _submit(self, call: TritonCall, arrays: Arrays) -> None:
        engine, o = self._engine, self._options
        asked = arrays, call.request_id, o.decoupled, engine.has_encoder, engine.max_seq_len
        encoders = decode_requests(*asked, o.exclude_input, o.logits_dtype)
        call.open = len(encoders)
        with self._lock:
            self._calls.add(call)
        for encoder in encoders:
            call.tickets.append(engine.submit(encoder.request, partial(self._put, call, encoder)))

    def _put(self, call: TritonCall, encoder: ResponseEncoder | None, event: Event) -> None:
        self._outbox.put((call, encoder, event))

    def _cancel_those(self, is_meant: Callable[[TritonCall], bool]) -> None:
        with self._lock:
            calls = [call for call in self._calls if is_meant(call)]
        for call in calls:
            self._cancel(call)

    def _cancel(self, call: TritonCall) -> None:
        for ticket in call.tickets:
            self._engine.cancel(ticket)

    def _send_all(self) -> None:
        """If sending or the engine dies, the process is useless: it exits for the launcher to restart."""
        try:
            checked = shown = sent = time.monotonic()
            ends = sent + LAST_RESPONSES_S
            while True:
                batch = self._waiting()
                for item in merge_waiting([item for item in batch if item is not None]):
                    try:
                        self._send(*item)
                    except Exception as error:
                        self._give_up(item[0], error)
                if None in batch[-1:]:
                    return
                now = time.monotonic()
                if batch or self._calls:
                    sent = now
                if self._engine.death is None:
                    ends = now + LAST_RESPONSES_S
                elif now > ends or now - sent >= SENT_S:  # the server may still have requests to refuse
                    os._exit(1)
                if now - checked >= self._options.cancellation_period:
                    self._cancel_abandoned()
                    checked = now
                if now - shown >= self._options.stats_period:
                    self._metrics.update(self._engine.stats())
                    shown = now
        except BaseException:
            logger.critical("the thread that sends responses died", exc_info=True)
            os._exit(1)

    def _waiting(self) -> list[Item | None]:
        """All items to be sent. None at the end means that nothing more will come."""
        try:
            batch = [self._outbox.get(timeout=self._options.cancellation_period)]
        except queue.Empty:
            return []
        while batch[-1] is not None and not self._outbox.empty():
            batch.append(self._outbox.get())
        return batch

    def _send(self, call: TritonCall, encoder: ResponseEncoder | None, event: Event) -> None:
        if encoder is not None and self._tracer is not None:
            self._trace(self._tracer, call, encoder, event)
        if event.finish_reason is not None:
            self._metrics.observe(encoder.request.lora if encoder is not None else UNREAD, event)
        if event.error is not None and not call.started:
            self._cancel(call)  # the other items of a failed batch
            self._finish(call, self._fail(event.error))
        elif encoder is None:
            self._finish(call, self._respond([]))
        elif not call.done:
            outputs = encoder.encode(event)
            if encoder.request.streaming:
                outputs.append(("request_number", call.number))
            lora = encoder.request.lora
            if self._options.tells_adapter and isinstance(lora, LoraInput):
                told = adapter_told(lora.name, lora.task_id)
                outputs.append(("lora_text", np.array([[told]], np.object_)))
            response = self._respond(outputs)
            call.open -= event.last
            if call.open == 0:
                self._finish(call, response)
            else:
                call.started = True
                send(call.sender, response)

    def _trace(self, tracer: Tracer, call: TritonCall, encoder: ResponseEncoder, event: Event) -> None:
        metrics, request = event.metrics, encoder.request
        params, lora = request.params, request.lora
        if event.finish_reason is not None:
            encoder.finish_reasons.append(event.finish_reason.value)
            encoder.num_output += metrics.output_tokens if metrics is not None else 0
        if not event.last:
            return
        names = [one.label for one, _ in lora.members] if lora is not None else []
        found = {
            "gen_ai.operation.name": "text_completion" if request.pooling is None else "embeddings",
            "gen_ai.request.model": "+".join(names) or NAME,
            "gen_ai.request.id": call.request_id or None,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.usage.input_tokens": metrics and metrics.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": metrics and metrics.cached_tokens,
            "gen_ai.usage.output_tokens": encoder.num_output,
            "gen_ai.response.finish_reasons": encoder.finish_reasons,
            "manylora.adapter.name": "+".join(names) or None,
            "manylora.adapter.version": event.versions[-1].number if event.versions else None,
            "manylora.adapter.digest": event.versions[-1].digest if event.versions else None,
            "manylora.adapter.tier": (metrics and metrics.adapter_tier) or None,
            "error.type": None if event.error is None else type(event.error).__name__,
        }
        problem = None if event.error is None else str(event.error)
        phases = metrics.phases if metrics is not None else {}
        tracer.record(found, phases, time.monotonic() - call.arrived, call.parent, problem)

    def _finish(self, call: TritonCall, response: Response) -> None:
        if not call.done:
            self._close(call)
            send(call.sender, response, FINAL)

    def _close(self, call: TritonCall) -> None:
        with self._lock:
            self._calls.discard(call)
        call.done = True

    def _give_up(self, call: TritonCall, error: Exception) -> None:
        """A response could not be created or sent: stop its request."""
        refusal = client_error(error, NAME)
        self._cancel(call)
        self._close(call)
        with suppress(Exception):
            send(call.sender, self._fail(refusal), FINAL)

    def _cancel_abandoned(self) -> None:
        """Check for some calls whether their client is still there; the others follow in later periods."""
        if not self._unchecked:
            with self._lock:
                self._unchecked = list(self._calls)
        chosen, self._unchecked = self._unchecked[:CHECKS_AT_ONCE], self._unchecked[CHECKS_AT_ONCE:]
        for call in chosen:
            try:
                if not call.done and call.sender.is_cancelled():
                    self._cancel(call)
            except Exception as error:
                self._give_up(call, error)
