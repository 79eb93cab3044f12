"""The parts of the Python backend's objects that this package uses, and when they are freed: not while the
server uses them, nor after its memory. ServerModel: what all models have in common. Texts and lists of words
as tensors: stop and bad words are one [2, L] per request, ids in row 0, cumulative ends in row 1. Errors for
clients: one sentence, never a stack trace.
"""

from __future__ import annotations

import gc
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from manylora.doors.triton.shape_guard import check_shapes
from manylora.doors.triton.tensor_table import MODELS
from manylora.errors import ConfigError, ManyloraError, RequestError, printable
from manylora.request import MAX_WORD_TOKENS
from manylora.system.lifeline import Lifeline

logger = logging.getLogger("manylora")
_logged: set[str] = set()

WHOLE = "context_and_generation"
INPUTS = re.compile(r"lora_\w+|pooling|classification_head|embedding_request")
"""Names that change an answer and are inputs wherever they are supported. HTTP's `generate` turns every field
that is not an input of the model into a parameter.
"""
ADAPTER = re.compile(r"loras?|lora_(?:(?:int_)?id|model|request|adapters?)|adapters?|adapter_\w+|model")
"""Names that mean an adapter on other servers."""
SERVERS_OWN = re.compile(
    r"triton_\w+|sequence_\w+|binary_data_output|priority|timeout|request_type|stream|traceparent|tracestate"
)
"""Parameters that Triton and its front ends add to a request's own."""
EXPECTED = ("Streaming",)  # TensorRT-LLM's client sends it
MOST_LOGGED = 64  # names of other parameters


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


def refuse(inputs: Arrays, *names: str) -> None:
    """Raises RequestError for an input that is not supported."""
    for name in names:
        if name in inputs:
            raise RequestError(f"input {name} is not supported by this server: leave it out")


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


class ServerModel:
    """The life of one of Triton's Python models. pb_utils: triton_python_backend_utils. open: the worker of a
    model with these arguments, which has `execute` and `close`; raises ConfigError or ValueError.
    """

    pb_utils: Any

    def open(self, args: Mapping[str, str], lifeline: Lifeline) -> Any:
        raise NotImplementedError

    def initialize(self, args: dict[str, str]) -> None:
        lifeline = Lifeline(args["model_instance_name"])
        check_shapes(self.pb_utils)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
        try:
            self._worker = self.open(args, lifeline)
        except (ConfigError, ValueError) as error:
            raise self.pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: Sequence[ServerRequest]) -> list[Response | None] | None:
        return self._worker.execute(requests)

    def finalize(self) -> None:
        """Tensors, requests and metrics are in the server's shared memory. When the interpreter ends, that is
        gone, and freeing them would crash.
        """
        self._worker.close()
        vars(self).clear()
        gc.collect()

    def fail(self, text: str) -> Response:
        return self.pb_utils.InferenceResponse(error=self.pb_utils.TritonError(text))

    def is_decoupled(self, args: Mapping[str, str]) -> bool:
        return self.pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))


def utf8(value: bytes | str, name: str) -> str:
    """One value of a text tensor. name: the client's name of the input. Raises RequestError."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise RequestError(f"{name} must be valid UTF-8") from None


def encode_word_lists(requests: Sequence[Sequence[Sequence[int]]] | None, count: int = 1) -> np.ndarray:
    """Token ids of each word of `count` requests as [count, 2, L] int32; ids end in 0, ends in -1. None: no
    words, L is 0.
    """
    if requests is None:
        return np.empty((count, 2, 0), np.int32)
    width = max([1, *(sum(map(len, words)) for words in requests)])
    table = np.zeros((len(requests), 2, width), np.int32)
    table[:, 1] = -1
    for (ids, ends), words in zip(table, requests, strict=True):
        ids[: sum(map(len, words))] = [token for word in words for token in word]
        ends[: len(words)] = list(accumulate(map(len, words)))
    return table


def decode_word_list(array: np.ndarray | None, name: str) -> tuple[tuple[int, ...], ...]:
    """The words of one request. name: of the input, for errors. Raises RequestError."""
    if array is None or array.size == 0:
        return ()
    wrong = f"Invalid format for word list. {name} must have ids in row 0 and their running ends in row 1"
    if array.ndim != 2 or len(array) != 2:
        raise RequestError(wrong)
    if array.shape[1] > MAX_WORD_TOKENS:
        raise RequestError(
            f"{name} must have at most {MAX_WORD_TOKENS} tokens, of all its words together, "
            f"got {array.shape[1]}"
        )
    ids, ends = array.tolist()
    stops = [end for end in ends if end != -1]
    if ends[: len(stops)] != stops or any(b <= a for a, b in zip([0, *stops], stops, strict=False)):
        raise RequestError(wrong)
    if stops and stops[-1] > len(ids):
        raise RequestError(wrong)
    return tuple(tuple(ids[start:stop]) for start, stop in zip([0, *stops], stops, strict=False))


def client_message(error: Exception, model: str) -> str:
    """The text for the client. An unexpected error is logged with its stack trace."""
    if isinstance(error, ManyloraError):
        return str(error)
    logger.error("%s failed", model, exc_info=error)
    return f"{model} failed on this request: {type(error).__name__}"


def client_error(error: Exception, model: str) -> RequestError:
    """The same, for an error that has its own kind."""
    return error if isinstance(error, RequestError) else RequestError(client_message(error, model))


def check_parameters(parameters: str, *, log: bool = True) -> None:
    """Raises RequestError as `check_phase`, and for an adapter or a kind of output for which the model has no
    input. Others are ignored, as they may be meant for other programs, and logged once.

    parameters: JSON, as given by Triton. log: false in a step of an ensemble beside the engine's.
    """
    check_phase(parameters)
    for name, value in json.loads(parameters or "{}").items() if len(parameters) > 2 else ():
        if ADAPTER.fullmatch(name) and not (name == "model" and value in list(MODELS)):
            raise RequestError(adapter_hint(name))
        if INPUTS.fullmatch(name):
            takers = [model for model, spec in MODELS.items() if any(one.name == name for one in spec.inputs)]
            told = "send what takes its place: no model has it"
            told = f"ask {' or '.join(takers)} with it" if takers else told
            raise RequestError(
                f"{name:.80} is no input of this model, and as a request parameter it would be ignored: "
                f"leave it out, or {told}"
            )
        is_known = SERVERS_OWN.fullmatch(name) or name in (*EXPECTED, *_logged)
        if log and not is_known and len(_logged) < MOST_LOGGED:
            _logged.add(name)
            logger.warning(
                "a request has %s, which is no input of its model: it is ignored, and not logged again",
                printable(name),
            )


def adapter_hint(name: str) -> str:
    """The refusal of a field that means an adapter elsewhere."""
    return (
        f"{name:.80} is no input of this model, and the base model would answer: name the adapter in "
        "lora_name, or its id in lora_task_id (llmapi: lora_id); for vllm_model lora_name belongs in "
        "sampling_parameters"
    )


def check_phase(parameters: str) -> None:
    """Raises RequestError for a request for one phase only, prefill or decode. parameters: Triton's JSON."""
    if "request_type" not in parameters:  # fast path: most requests have none
        return
    kind = json.loads(parameters).get("request_type", WHOLE)
    if kind != WHOLE:
        raise RequestError(
            f"request parameter request_type {kind!r:.80} is not supported by this server: leave it out, or "
            f"send {WHOLE!r}"
        )
