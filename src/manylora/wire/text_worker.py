"""TextWorker: answers requests of pre- and postprocessing. Long texts are processed on other threads, so that
short ones do not wait.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic

from manylora.system.lifeline import Lifeline
from manylora.system.text_threads import TextThreads
from manylora.wire.client_errors import check_parameters, client_message
from manylora.wire.server_types import FINAL, Arrays, Response, ResponseSender, ServerRequest, send
from manylora.wire.shape_guard import read_inputs


class TextWorker(Generic[Response]):
    """name: the model's, for the log. lifeline: gets the number of open requests.

    length: size of a request's texts, in characters or tokens; raises RequestError for invalid inputs.
    respond: computes the response to a request's inputs; may raise. fail: converts an error's text to a
    response.
    """

    def __init__(
        self,
        name: str,
        lifeline: Lifeline,
        length: Callable[[Arrays], int],
        respond: Callable[[Arrays], Response],
        fail: Callable[[str], Response],
    ) -> None:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
        self._name, self._lifeline = name, lifeline
        self._length, self._respond, self._fail = length, respond, fail
        self._threads = TextThreads()

    def execute(self, requests: Sequence[ServerRequest[Response]]) -> list[Response | None]:
        """The return value of a model's `execute`. None: the response is sent later."""
        with self._lifeline.busy():
            return [self._answer(request) for request in requests]

    def close(self) -> None:
        self._threads.close()

    def _answer(self, request: ServerRequest[Response]) -> Response | None:
        try:
            check_parameters(request.parameters(), log=False)
            inputs = read_inputs(request.inputs())
            threads = self._threads.executor(self._length(inputs))
        except Exception as error:
            return self._failure(error)
        if threads is None:
            return self._response(inputs)
        busy = ExitStack()
        busy.enter_context(self._lifeline.busy())
        threads.submit(self._send, request.get_response_sender(), inputs, busy)
        return None

    def _send(self, sender: ResponseSender[Response], inputs: Arrays, busy: ExitStack) -> None:
        with busy:
            try:
                send(sender, self._response(inputs), FINAL)
            except Exception as error:
                client_message(error, self._name)  # only logged: this client cannot be told

    def _response(self, inputs: Arrays) -> Response:
        try:
            return self._respond(inputs)
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> Response:
        return self._fail(client_message(error, self._name))
