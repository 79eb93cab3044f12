"""TextGenerator: text in, text out by calling the other models, as in `tensorrt_llm_bls`."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np

from manylora.errors import RequestError
from manylora.wire import bls
from manylora.wire.client_errors import check_parameters
from manylora.wire.server_types import Arrays, ServerRequest, ServerTensor
from manylora.wire.shape_guard import read_inputs

ENGINE_OUTPUTS = [*bls.TO_POSTPROCESSING, *bls.PASSED_ON]

Values = Mapping[str, np.ndarray | ServerTensor]
"""Tensors by name. A tensor of the server's is only passed through."""

T = TypeVar("T")


class CallModel(Protocol):
    def __call__(
        self, model: str, inputs: Values, outputs: Sequence[str], request_id: str = ""
    ) -> Iterable[Mapping[str, ServerTensor]]:
        """The outputs of each response, as they arrive. Raises RequestError with the model's error text.

        request_id: for an engine's model, which may return several responses.
        """


class ClientRequest:
    """A client's request, and its open requests to engines. Thread-safe.

    is_cancelled: asks the server whether the client has disconnected. Do not call it after `finish`.
    """

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled
        self._lock = threading.Lock()
        self._open: set[tuple[str, str]] = set()
        self._finished = False
        self.abandoned = False  # its responses are no longer wanted

    @contextmanager
    def engine_request(self, model: str) -> Iterator[str]:
        """Context for a request to an engine's model. Yields a unique id. Raises RequestError."""
        if self.abandoned:
            raise RequestError("the client has left")
        request = (model, str(uuid.uuid4()))
        with self._lock:
            self._open.add(request)
        try:
            yield request[1]
        finally:
            with self._lock:
                self._open.discard(request)

    def finish(self) -> None:
        """Call this before sending the final response."""
        with self._lock:
            self._finished = True

    def to_stop(self) -> list[tuple[str, str]]:
        """Models and ids of open requests whose client has disconnected."""
        with self._lock:
            self.abandoned = self.abandoned or (not self._finished and self._is_cancelled())
            return list(self._open) if self.abandoned else []


class TextGenerator:
    """engine, draft: names of the models that generate and, for speculative decoding, draft.

    accumulate: each response of a stream has the whole text so far, not only the new part.
    """

    def __init__(self, call: CallModel, engine: str, draft: str | None, accumulate: bool) -> None:
        self._call, self._engine, self._draft, self._accumulate = call, engine, draft, accumulate

    def answer(self, client: ClientRequest, request: ServerRequest[Any]) -> Iterator[Values]:
        """`responses` to one of the server's requests."""
        check_parameters(request.parameters())
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        lora_weights = tensors.pop("lora_weights", None)
        return self.responses(client, read_inputs(tensors.values()), lora_weights)

    def responses(
        self, client: ClientRequest, inputs: Arrays, lora_weights: ServerTensor | None
    ) -> Iterator[Values]:
        """Outputs of each response, as they arrive. Every item of a batch is generated separately.

        inputs: all except lora_weights. Raises RequestError.
        """
        bls.check_inputs(inputs, self._accumulate, self._draft is not None)
        batch = bls.items(inputs)
        weights = bls.lora_weights_of_items(lora_weights, len(batch))
        if len(batch) == 1:
            return self._item(client, batch[0], weights[0], None)
        rows = enumerate(zip(batch, weights, strict=True))
        return _interleaved([self._item(client, *row, index) for index, row in rows])

    def stop(self, model: str, request_id: str) -> None:
        """Stop a request to an engine's model."""
        stop_request(self._call, model, request_id)

    def _item(
        self,
        client: ClientRequest,
        inputs: Arrays,
        lora_weights: np.ndarray | ServerTensor | None,
        index: int | None,
    ) -> Iterator[Values]:
        engine_inputs: dict[str, np.ndarray | ServerTensor] = {**self._prepare(inputs)}
        engine_inputs |= {name: inputs[source] for source, name in bls.TO_ENGINE.items() if source in inputs}
        if lora_weights is not None:
            engine_inputs["lora_weights"] = lora_weights
        if _number(inputs, "num_draft_tokens") > 0:
            yield self._speculate(client, inputs, engine_inputs, index)
            return
        streaming = bool(_number(inputs, "stream"))
        whole = self._accumulate and streaming
        stops = _stop_words(inputs, streaming, whole)
        so_far: dict[int, np.ndarray] = {}
        with client.engine_request(self._engine) as request_id:
            for response in self._call(self._engine, engine_inputs, ENGINE_OUTPUTS, request_id):
                if "output_ids" not in response:
                    continue
                place = response.get("sequence_index")
                sequence = 0 if place is None else int(place.as_numpy().reshape(-1)[0])
                outputs: Values = response
                if whole:
                    ids = response["output_ids"].as_numpy()
                    if sequence in so_far:
                        ids = np.concatenate((so_far[sequence], ids), axis=2)
                    so_far[sequence] = ids
                    outputs = _with_ids(response, ids)
                counts = _counts(inputs, engine_inputs, outputs)
                yield {
                    **_response(stops.cut(sequence, self._texts(outputs)), outputs, index),
                    **counts,
                }
                if stops.all_stopped:
                    self.stop(self._engine, request_id)

    def _prepare(self, inputs: Arrays) -> Arrays:
        """Convert text to the inputs of the engine's model."""
        texts = {name: inputs[source] for source, name in bls.TO_PREPROCESSING.items() if source in inputs}
        [outputs] = self._call("preprocessing", texts, list(bls.FROM_PREPROCESSING))
        return {bls.FROM_PREPROCESSING[name]: tensor.as_numpy() for name, tensor in outputs.items()}

    def _texts(self, outputs: Values) -> list[str]:
        names = bls.TO_POSTPROCESSING
        sent = {names[name]: _array(value) for name, value in outputs.items() if name in names}
        [answer] = self._call("postprocessing", sent, ["OUTPUT"])
        return [text.decode() for text in answer["OUTPUT"].as_numpy().reshape(-1)]

    def _speculate(
        self, client: ClientRequest, inputs: Arrays, engine_inputs: Values, index: int | None
    ) -> Values:
        """The whole answer in one response: that of the last step, with all ids."""
        prompt = _array(engine_inputs["input_ids"]).reshape(-1).tolist()
        common = dict(engine_inputs) | {"exclude_input_in_output": np.array([[True]])}
        plain = {name: value for name, value in common.items() if not name.startswith("lora_")}
        last: Mapping[str, ServerTensor] = {}

        def first_response(model: str, sent: Values) -> Mapping[str, ServerTensor]:
            with client.engine_request(model) as request_id:
                return next(iter(self._call(model, sent, ENGINE_OUTPUTS, request_id)))

        def step(ids: list[int], count: int) -> dict[str, np.ndarray]:
            """Each step's prompt includes the output so far, so positions counted from the prompt's end
            shift.
            """
            moved = _prompt(ids, count)
            if "prompt_ignore_length" in inputs:
                moved["prompt_ignore_length"] = np.minimum(inputs["prompt_ignore_length"], len(prompt))
            if "min_length" in inputs:
                moved["min_length"] = np.maximum(inputs["min_length"] - (len(ids) - len(prompt)), 0)
            return moved

        def guess(ids: list[int], count: int) -> list[int]:
            return _ids_of(first_response(str(self._draft), plain | step(ids, count)))

        def confirm(ids: list[int], draft: list[int]) -> tuple[list[int], bool]:
            nonlocal last
            more = {"draft_input_ids": np.array([draft], np.int32)} if draft else {}
            last = first_response(self._engine, common | step(ids, len(draft) + 1) | more)
            return _ids_of(last), last["finish_reason"].as_numpy().reshape(-1)[0] not in (b"", b"length")

        wanted = _number(inputs, "max_tokens"), _number(inputs, "num_draft_tokens")
        output = bls.speculate(prompt, *wanted, guess, confirm)
        ids = output if _number(inputs, "exclude_input_in_output") else prompt + output
        outputs = _with_ids(last, np.array([[ids]], np.int32))
        return _response(self._texts(outputs), outputs, index)


def stop_request(call: CallModel, model: str, request_id: str) -> None:
    """Stop a request to an engine's model."""
    list(call(model, {**_prompt([0], 0), "stop": np.array([[True]])}, ENGINE_OUTPUTS, request_id))


def _interleaved(streams: Sequence[Iterator[T]]) -> Iterator[T]:
    """Yield items of all streams as they arrive; each stream runs on its own thread. All run to their end.
    After a failure nothing more is yielded, and the first failure is raised.
    """
    merged: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
    end = (None, None)

    def run(stream: Iterator[T]) -> None:
        try:
            for one in stream:
                merged.put((one, None))
        except Exception as error:
            merged.put((None, error))
        merged.put(end)

    for stream in streams:
        threading.Thread(target=run, args=(stream,), daemon=True).start()
    running, failure = len(streams), None
    while running:
        one, error = merged.get()
        if error is not None:
            failure = failure or error
        elif one is None:
            running -= 1
        elif failure is None:
            yield one
    if failure is not None:
        raise failure


def _stop_words(inputs: Arrays, streaming: bool, repeated: bool) -> bls.StopWords:
    words = [word.decode() for word in inputs.get("stop_words", np.array([])).reshape(-1)]
    echoed = not streaming and not _number(inputs, "exclude_input_in_output")
    return bls.StopWords(words, len(inputs["text_input"].reshape(-1)[0].decode()) if echoed else 0, repeated)


def _prompt(ids: list[int], count: int) -> dict[str, np.ndarray]:
    """Inputs for `count` new tokens after ids."""
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[count]], np.int32),
    }


def _with_ids(outputs: Values, ids: np.ndarray) -> Values:
    """The response with ids [1, beams, tokens] instead of the new ones, as if it were the first response."""
    lengths = np.array([[ids.shape[2]] * ids.shape[1]], np.int32)
    others = {name: value for name, value in outputs.items() if name != "previous_ids"}
    return others | {"output_ids": ids, "sequence_length": lengths}


def _response(texts: Sequence[str], outputs: Values, index: int | None) -> Values:
    """index: the item's index in a batch; None: there is only one item."""
    response: dict[str, np.ndarray | ServerTensor] = {
        "text_output": np.array([text.encode() for text in texts], np.object_)
    }
    response |= {name: v for name, v in outputs.items() if name in bls.PASSED_ON and name != "batch_index"}
    if index is not None:
        response["batch_index"] = np.array([[index]], np.int32)
    return response


def _counts(inputs: Arrays, engine_inputs: Values, outputs: Values) -> Values:
    """Token counts of the prompt, and of the first beam in this response, if requested."""
    found = {}
    if _number(inputs, "return_num_input_tokens"):
        found["num_input_tokens"] = _array(engine_inputs["input_lengths"])[:1].reshape(1, 1)
    if _number(inputs, "return_num_output_tokens"):
        count = int(_array(outputs["sequence_length"]).reshape(-1)[0])
        prompt = _array(engine_inputs["input_ids"]).reshape(-1).tolist()
        echoed = "previous_ids" not in outputs and _ids_of(outputs)[: len(prompt)] == prompt
        found["num_output_tokens"] = np.array([[count - len(prompt) * echoed]], np.int32)
    return found


def _ids_of(outputs: Values) -> list[int]:
    return _array(outputs["output_ids"])[0, 0].tolist()


def _array(value: np.ndarray | ServerTensor) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.as_numpy()


def _number(inputs: Arrays, name: str) -> int:
    """A scalar input, or 0 if absent."""
    return int(inputs[name].reshape(-1)[0]) if name in inputs else 0
