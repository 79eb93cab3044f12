"""Desk: where pre- and postprocessing answer. A long text goes to a thread, and the next need not wait."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from manylora.system.lifeline import Lifeline
from manylora.system.text_threads import Lanes
from manylora.wire.client_errors import check_parameters, sentence
from manylora.wire.shape_guard import read_inputs

__all__ = ["Arrays", "Desk"]

Arrays = Mapping[str, np.ndarray]
"""Inputs by name, each with its leading batch dimension."""


class Desk:
    """lifeline: told how much is held. utils: Triton's module of Python models. measure: the length of a
    request's text, in characters or tokens; it raises RequestError for inputs that are not right. work:
    inputs to output tensors."""

    def __init__(
        self,
        name: str,
        lifeline: Lifeline,
        utils: Any,
        measure: Callable[[Arrays], int],
        work: Callable[[Arrays], Sequence[Any]],
    ) -> None:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
        self._name, self._utils, self._measure, self._work = name, utils, measure, work
        self._lanes = Lanes()
        self._lifeline = lifeline

    def answer(self, requests: Sequence[Any]) -> list[Any]:
        """What `execute` returns. A response that is None is sent later."""
        with self._lifeline.busy():
            return [self._take(request) for request in requests]

    def close(self) -> None:
        self._lanes.close()

    def _take(self, request: Any) -> Any:
        try:
            check_parameters(request.parameters())
            arrays = read_inputs(request.inputs())
            lane = self._lanes.lane(self._measure(arrays))
        except Exception as error:
            return self._failure(error)
        if lane is None:
            return self._respond(arrays)
        held = ExitStack()
        held.enter_context(self._lifeline.busy())
        lane.submit(self._send, request.get_response_sender(), arrays, held)
        return None

    def _send(self, sender: Any, arrays: Arrays, held: ExitStack) -> None:
        with held:
            response = self._respond(arrays)
            try:
                sender.send(response, flags=self._utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception as error:
                sentence(error, self._name)

    def _respond(self, arrays: Arrays) -> Any:
        try:
            return self._utils.InferenceResponse(self._work(arrays))
        except Exception as error:
            return self._failure(error)

    def _failure(self, error: Exception) -> Any:
        return self._utils.InferenceResponse(error=self._utils.TritonError(sentence(error, self._name)))
