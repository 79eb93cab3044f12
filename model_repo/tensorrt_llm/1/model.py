"""Tensors to requests, events to responses. The engine has its own thread, and so has the sending."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from exporter import Exporter

from manylora.engine.loop import EngineLoop
from manylora.errors import ConfigError, DrainingError, RequestError
from manylora.system.lifeline import Lifeline
from manylora.wire.client_disconnects import listen
from manylora.wire.client_errors import check_parameters, client_message
from manylora.wire.decode import decode_requests, is_stop
from manylora.wire.encode import Reply, merge_waiting
from manylora.wire.parameters import engine_config, flag, logits_dtype, milliseconds, parameters_of
from manylora.wire.shape_guard import check_shapes, read_inputs

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Asking whether a request was cancelled is a call into the server and back, and responses wait for it.
CHECKS_AT_ONCE = 16
# The engine's thread and the one that answers take turns in Python; a turn is 5 ms by default, and a step
# stands still for as long.
TURN_S = 1e-4
STALLED_S = 5.0  # of the engine's thread, from which it counts as busy without any request
LAST_WORDS_S, SENT_S = 5.0, 0.5  # that open requests have to be told of the engine's end; that the last has
SMALL, KEPT = 8, 1024  # bytes of an output tensor that is kept for the next time; how many are


@dataclass(eq=False)
class Call:
    """One Triton request: its sender, and how many engine requests are open."""

    request_id: str
    sender: object
    open: int
    tickets: list
    number: np.ndarray  # [1, 1], the first dimension is the batch's
    started: bool = False
    done: bool = False


class TritonPythonModel:
    def initialize(self, args):
        self._lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
        parameters, config = parameters_of(args["model_config"]), json.loads(args["model_config"])
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._calls: dict[str, set[Call]] = {}  # request id -> open calls
        self._live: set[Call] = set()
        self._unchecked: list[Call] = []  # of the present round of `_cancel_abandoned`
        self._exporter = Exporter(args["model_name"], args["model_version"])
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        try:
            self._logits_dtype = logits_dtype(config)
            self._exclude_input = flag(parameters, "exclude_input_in_output", False)
            self._period = min(milliseconds(parameters, "cancellation_check_period_ms", 100), 1.0)
            self._stats_period = milliseconds(parameters, "stats_check_period_ms", 100)
            self._loop = EngineLoop.start(engine_config(parameters))
            sys.setswitchinterval(TURN_S)
        except (ConfigError, ValueError) as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._lifeline.activity = self._activity
        self._sender = threading.Thread(target=self._send_all, name="manylora-send", daemon=True)
        self._sender.start()
        listen(self._client_left)

    def execute(self, requests):
        for request in requests:
            self._take(request)

    def finalize(self):
        self._loop.close()
        self._outbox.put(None)
        self._sender.join()

    def _activity(self):
        """A thread that is stuck between requests holds up the next ones: it counts as one."""
        return len(self._live) or int(self._loop.stalled_s > STALLED_S), self._loop.stats().steps

    def _take(self, request):
        number = np.array([[next(self._numbers)]], np.int64)
        call = Call(request.request_id(), request.get_response_sender(), 0, [], number)
        try:
            check_parameters(request.parameters())
            arrays = read_inputs(request.inputs(), _bfloat16_bits)
            if is_stop(arrays):
                self._stop(call.request_id)
                self._outbox.put((call, None, None))
                return
            if self._lifeline.draining:
                raise DrainingError()
            limits = self._loop.has_encoder, self._loop.max_seq_len
            decoded = decode_requests(arrays, call.request_id, self._decoupled, *limits)
            call.open = len(decoded)
            with self._lock:
                self._live.add(call)
                self._calls.setdefault(call.request_id, set()).add(call)
            for index, one in enumerate(decoded):
                exclude = self._exclude_input if one.exclude_input is None else one.exclude_input
                place = index if len(decoded) > 1 else None
                reply = Reply(one.request, place, exclude, one.statistics, self._logits_dtype)
                sink = partial(self._sink, call, reply)
                call.tickets.append(self._loop.submit(one.request, sink))
        except Exception as error:
            self._outbox.put((call, None, RequestError(client_message(error, "tensorrt_llm"))))
        if call.done:  # one item of a batch has failed already
            self._cancel(call)

    def _sink(self, call, reply, event):
        self._outbox.put((call, reply, event))

    def _stop(self, request_id):
        if not request_id:
            raise RequestError("Trying to stop a request but request ID is not provided")
        with self._lock:
            calls = list(self._calls.get(request_id, ()))
        for call in calls:
            self._cancel(call)

    def _cancel(self, call):
        for ticket in call.tickets:
            self._loop.cancel(ticket)

    def _client_left(self, number):
        """Of the ensemble: Triton tells it to postprocessing only."""
        with self._lock:
            calls = [call for call in self._live if call.number.item() == number]
        for call in calls:
            self._cancel(call)

    def _send_all(self):
        """The one thread that answers. Without it, or without the engine, the process is of no use: the
        launcher starts another."""
        try:
            self._answer()
        except BaseException:
            logging.getLogger("manylora").critical("the thread that answers died", exc_info=True)
            os._exit(1)

    def _answer(self):
        """Until `finalize`. Events of a stream that wait together leave as one response."""
        checked = shown = ends = time.monotonic()
        while True:
            try:
                batch = [self._outbox.get(timeout=self._period)]
            except queue.Empty:
                batch = []
            while not self._outbox.empty():
                batch.append(self._outbox.get())
            for item in merge_waiting(batch):
                if item is None:
                    return
                try:
                    self._send(*item)
                except Exception:
                    logging.getLogger("manylora").exception("a response could not be sent")
                    self._forget(item[0])
            now = time.monotonic()
            if self._loop.death is None:
                ends = now + LAST_WORDS_S
            elif now > ends or (self._outbox.empty() and not self._live):
                time.sleep(SENT_S)
                os._exit(1)
            if now - checked >= self._period:
                self._cancel_abandoned()
                checked = now
            if now - shown >= self._stats_period:
                self._exporter.update(self._loop.stats())
                shown = now

    def _send(self, call, reply, event):
        failure = event if reply is None else event.error
        if reply is not None and event.finish_reason is not None:
            self._exporter.observe(reply.request.lora, event)
        if failure is not None and not call.started:
            self._cancel(call)  # the other items of a failed batch
            self._finish(call, pb_utils.InferenceResponse(error=pb_utils.TritonError(str(failure))))
            return
        if reply is None:
            self._finish(call, pb_utils.InferenceResponse([]))
            return
        if call.done:
            return
        tensors = reply.encode(event)
        if reply.request.streaming:
            tensors.append(("request_number", call.number))
        response = pb_utils.InferenceResponse([_tensor(*pair) for pair in tensors])
        call.open -= event.last
        if call.open == 0:
            self._finish(call, response)
        else:
            call.started = True
            call.sender.send(response)

    def _finish(self, call, response):
        if not call.done:
            self._forget(call)
            call.done = True
            call.sender.send(response, flags=FINAL)

    def _forget(self, call):
        with self._lock:
            self._live.discard(call)
            same = self._calls.get(call.request_id, set())
            same.discard(call)
            if not same:
                self._calls.pop(call.request_id, None)

    def _cancel_abandoned(self):
        """Ask for some open calls, the rest in the next periods."""
        if not self._unchecked:
            with self._lock:
                self._unchecked = list(self._live)
        for _ in range(min(CHECKS_AT_ONCE, len(self._unchecked))):
            call = self._unchecked.pop()
            if not call.done and call.sender.is_cancelled():
                self._cancel(call)


def _tensor(name, array):
    """Small tensors, a token or a length, come again and again, and making one costs more than sending it."""
    if array.nbytes > SMALL or array.dtype.hasobject:
        return pb_utils.Tensor(name, array)
    return _small_tensor(name, array.shape, array.dtype.str, array.tobytes())


@lru_cache(KEPT)
def _small_tensor(name, shape, dtype, content):
    return pb_utils.Tensor(name, np.frombuffer(content, dtype).reshape(shape))


def _bfloat16_bits(tensor):
    """NumPy has no bfloat16: its bits come as two-byte voids."""
    return torch.from_dlpack(tensor.to_dlpack()).view(torch.int16).numpy().view("V2")
