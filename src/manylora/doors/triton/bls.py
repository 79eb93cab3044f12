"""TextGenerator: text in, text out by calling the other models, as in `tensorrt_llm_bls`."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

import numpy as np

from manylora.doors.triton.server_types import Arrays, ServerRequest, ServerTensor, check_parameters, refuse
from manylora.doors.triton.shape_guard import read_inputs
from manylora.doors.triton.tensor_table import ENSEMBLE
from manylora.errors import RequestError
from manylora.generation.generation import StopTexts
from manylora.generation.sampling import parameters_of

UPPER = (
    "end_id", "pad_id", "prompt_table_extra_id", "embedding_bias_words", "embedding_bias_weights",
    "lora_task_id", "lora_name",
)  # fmt: skip
TO_PREPROCESSING = {name: name.upper() for name in UPPER} | {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
}
SAME = (
    "return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics",
    "return_kv_cache_reuse_stats", "beam_width", "num_return_sequences", "exclude_input_in_output",
    "prompt_embedding_table", "prompt_vocab_size", "lora_task_id", "lora_config", "lora_invocation_tokens",
    "lora_name", "lora_ckpt_source", "lora_mix_task_ids", "lora_mix_names", "lora_mix_scales", "lora_version",
    "guided_decoding_guide_type", "guided_decoding_guide",
)  # fmt: skip
TWO_NAMES = {one.name: one.text for one in parameters_of("bls") if one.name in ("seed", "min_tokens")}
"""Names of inputs in later releases, and their earlier names."""
TO_ENGINE = {
    **{one.text: one.tensor for one in parameters_of("bls")},
    **TWO_NAMES,
    **{name: name for name in SAME},
    "stream": "streaming",
}
FROM_PREPROCESSING = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
    "OUT_SAMPLING_DEFAULTS": "sampling_defaults",
}
TO_POSTPROCESSING = {name: name.upper() for name in ("sequence_length", "previous_ids", "finish_reason")}
TO_POSTPROCESSING |= {"output_ids": "TOKENS_BATCH", "lora_text": "LORA_TEXT"}
# Outputs of the engine's model that are passed to the client unchanged.
PASSED_ON = [tensor.name for tensor in ENSEMBLE.outputs if tensor.name != "text_output"]
ENGINE_OUTPUTS = [*TO_POSTPROCESSING, *PASSED_ON]
REFUSED = ("image_input", "image_bytes_input", "image_url_input", "video_bytes_input")

Values = Mapping[str, np.ndarray | ServerTensor]
"""Tensors by name. A tensor of the server's is only passed through."""

T = TypeVar("T")

CallModel = Callable[..., Iterable[Mapping[str, ServerTensor]]]
"""Calls another model: see `ServerCalls.call`."""


class ClientRequest:
    """A client's request, and its open requests to engines. Thread-safe. is_cancelled: until `finish`."""

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
    """engine, draft: models that generate and draft. accumulate: streams repeat the whole text so far."""

    def __init__(self, call: CallModel, engine: str, draft: str | None, accumulate: bool) -> None:
        self._call, self._engine, self._draft, self._accumulate = call, engine, draft, accumulate

    def answer(self, client: ClientRequest, request: ServerRequest) -> Iterator[Values]:
        check_parameters(request.parameters())
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        lora_weights = tensors.pop("lora_weights", None)
        return self.responses(client, read_inputs(tensors.values()), lora_weights)

    def responses(
        self, client: ClientRequest, inputs: Arrays, lora_weights: ServerTensor | None
    ) -> Iterator[Values]:
        """Outputs of each response, as they arrive; a batch's items by themselves. Raises RequestError."""
        check_inputs(inputs, self._accumulate, self._draft is not None)
        batch = items(inputs)
        if len(batch) == 1:  # its weights are passed through, because NumPy has no bfloat16
            return self._item(client, batch[0], lora_weights, None)
        weights: list[np.ndarray | None] = [None] * len(batch)
        if lora_weights is not None:
            try:
                given = read_inputs([lora_weights])["lora_weights"]
            except RequestError:
                raise
            except Exception:
                raise RequestError(
                    "lora_weights as BF16 can be sent with a batch of one only: send it once before the batch"
                ) from None
            weights = [given[i : i + 1] for i in range(len(batch))]
        rows = enumerate(zip(batch, weights, strict=True))
        return _interleaved([self._item(client, *row, index) for index, row in rows])

    def _item(
        self,
        client: ClientRequest,
        inputs: Arrays,
        lora_weights: np.ndarray | ServerTensor | None,
        index: int | None,
    ) -> Iterator[Values]:
        texts = {name: inputs[source] for source, name in TO_PREPROCESSING.items() if source in inputs}
        [prepared] = self._call("preprocessing", texts, list(FROM_PREPROCESSING))
        engine_inputs: dict[str, np.ndarray | ServerTensor] = {}
        engine_inputs |= {FROM_PREPROCESSING[name]: one.as_numpy() for name, one in prepared.items()}
        engine_inputs |= {name: inputs[source] for source, name in TO_ENGINE.items() if source in inputs}
        if lora_weights is not None:
            engine_inputs["lora_weights"] = lora_weights
        if _number(inputs, "num_draft_tokens") > 0:
            yield self._speculate(client, inputs, engine_inputs, index)
            return
        streaming = bool(_number(inputs, "stream"))
        whole = self._accumulate and streaming
        words = [word.decode() for word in inputs.get("stop_words", np.array([])).reshape(-1)]
        echoed = not streaming and not _number(inputs, "exclude_input_in_output")
        stops = StopWords(words, len(inputs["text_input"].reshape(-1)[0].decode()) if echoed else 0, whole)
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
                yield {**_response(stops.cut(sequence, self._texts(outputs)), outputs, index), **counts}
                if stops.all_stopped:
                    stop_request(self._call, self._engine, request_id)

    def _texts(self, outputs: Values) -> list[str]:
        names = TO_POSTPROCESSING
        sent = {names[name]: _array(value) for name, value in outputs.items() if name in names}
        [answer] = self._call("postprocessing", sent, ["OUTPUT"])
        return [text.decode() for text in answer["OUTPUT"].as_numpy().reshape(-1)]

    def _speculate(
        self, client: ClientRequest, inputs: Arrays, engine_inputs: Values, index: int | None
    ) -> Values:
        """The whole answer in one response: that of the last step, with all ids. In each step the draft model
        guesses tokens, and the engine confirms some of them and adds one of its own.
        """
        prompt = _array(engine_inputs["input_ids"]).reshape(-1).tolist()
        common = dict(engine_inputs) | {"exclude_input_in_output": np.array([[True]])}
        plain = {name: value for name, value in common.items() if not name.startswith("lora_")}
        limit, most = _number(inputs, "max_tokens"), _number(inputs, "num_draft_tokens")

        def first_response(model: str, sent: Values) -> Mapping[str, ServerTensor]:
            with client.engine_request(model) as request_id:
                return next(iter(self._call(model, sent, ENGINE_OUTPUTS, request_id)))

        output, ended = list[int](), False
        last: Mapping[str, ServerTensor] = {}
        while len(output) < limit and not ended:
            # The prompt includes the output so far, so positions counted from the prompt's end shift.
            moved: dict[str, np.ndarray] = {}
            if "prompt_ignore_length" in inputs:
                moved["prompt_ignore_length"] = np.minimum(inputs["prompt_ignore_length"], len(prompt))
            if "min_length" in inputs:
                moved["min_length"] = np.maximum(inputs["min_length"] - len(output), 0)
            ids, count, draft = [*prompt, *output], min(most, limit - len(output) - 1), list[int]()
            if count > 0:
                draft = _ids_of(first_response(str(self._draft), plain | _prompt(ids, count) | moved))
            if draft:
                moved["draft_input_ids"] = np.array([draft], np.int32)
            last = first_response(self._engine, common | _prompt(ids, len(draft) + 1) | moved)
            output += _ids_of(last)
            ended = last["finish_reason"].as_numpy().reshape(-1)[0] not in (b"", b"length")
        ids = output if _number(inputs, "exclude_input_in_output") else prompt + output
        outputs = _with_ids(last, np.array([[ids]], np.int32))
        return _response(self._texts(outputs), outputs, index)


def stop_request(call: CallModel, model: str, request_id: str) -> None:
    list(call(model, {**_prompt([0], 0), "stop": np.array([[True]])}, ENGINE_OUTPUTS, request_id))


def _interleaved(streams: Sequence[Iterator[T]]) -> Iterator[T]:
    """Items of all streams as they arrive, each on a thread of its own. The first failure is raised last."""
    merged: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run(stream: Iterator[T]) -> None:
        try:
            for one in stream:
                merged.put((one, None))
        except Exception as error:
            merged.put((None, error))
        merged.put((None, None))

    for stream in streams:
        inside = copy_context()  # with the client's trace
        threading.Thread(target=inside.run, args=(run, stream), daemon=True).start()
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


def _prompt(ids: list[int], count: int) -> dict[str, np.ndarray]:
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
    response |= {name: v for name, v in outputs.items() if name in PASSED_ON and name != "batch_index"}
    if index is not None:
        response["batch_index"] = np.array([[index]], np.int32)
    return response


def _counts(inputs: Arrays, engine_inputs: Values, outputs: Values) -> Values:
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
    return int(inputs[name].reshape(-1)[0]) if name in inputs else 0


def check_inputs(values: Arrays, accumulate: bool, has_draft_model: bool) -> None:
    """Raises RequestError, with TensorRT-LLM's texts where there is one."""
    refuse(values, *(name for name in REFUSED if name in values and values[name].size))
    if "text_input" not in values:
        raise RequestError("text_input is required")
    for name, other in TWO_NAMES.items():
        if name in values and other in values and (values[name] != values[other]).any():
            raise RequestError(f"{name} and {other} are one setting, and differ: send one of them")
    if "max_tokens" not in values or (values["max_tokens"] < 1).any():
        raise RequestError("max_tokens must be a single value > 0")

    def any_of(name: str, limit: float = 0) -> bool:
        return name in values and bool((values[name].astype(np.float64) > limit).any())

    if any_of("stream") and accumulate and any_of("beam_width", 1):
        raise RequestError("Accumulation of tokens is only implemented for beam width = 1")
    if "num_draft_tokens" in values and (values["num_draft_tokens"] < 0).any():
        raise RequestError(f"num_draft_tokens must be >= 0, got {values['num_draft_tokens'].min()}")
    if any_of("num_draft_tokens"):
        if not has_draft_model:
            raise RequestError("cannot perform speculative decoding without draft model")
        for name, text in (("stream", "streaming is"), ("return_context_logits", "context logits are")):
            if any_of(name):
                raise RequestError(f"{text} not supported with speculative decoding")
        if any_of("use_draft_logits"):
            raise RequestError("use_draft_logits is not supported by this server: send false")
        for name in ("beam_width", "num_return_sequences"):
            if any_of(name, 1):
                raise RequestError(f"{name} must be 1 with speculative decoding")


def items(values: Arrays) -> list[dict[str, np.ndarray]]:
    """Each item of the batch with a batch dimension of one. Scalars as [1, 1]."""
    count = len(values["text_input"])
    for name, array in values.items():
        if len(array) != count:
            raise RequestError(
                f"Expected batch size doesn't match batch size for tensor {name}. "
                f"Expected {count} got {len(array)}"
            )
    rows = {name: array.reshape(-1, 1) if array.ndim == 1 else array for name, array in values.items()}
    return [{name: array[i : i + 1] for name, array in rows.items()} for i in range(count)]


class StopWords:
    """Stop words of all sequences of a request, matched on text. The word stays in the output.

    skip: characters at the start in which no word counts. repeated: every text starts from the beginning.
    """

    def __init__(self, words: Sequence[str], skip: int = 0, repeated: bool = False) -> None:
        self._words, self._skip, self._repeated = StopTexts(words), skip, repeated
        self._seen: dict[tuple[int, int], str] = {}  # (sequence, beam) -> its text so far
        self._stopped: set[tuple[int, int]] = set()

    @property
    def all_stopped(self) -> bool:
        return bool(self._seen) and self._stopped == self._seen.keys()

    def cut(self, sequence: int, texts: Sequence[str]) -> list[str]:
        """The next text of each beam of a sequence, up to the end of the first stop word."""
        if not self._words:
            return list(texts)
        cut = []
        for beam, text in enumerate(texts):
            place = (sequence, beam)
            if self._repeated:
                self._seen.pop(place, None)
                self._stopped.discard(place)
            if place in self._stopped:
                cut.append("")
                continue
            before = self._seen.get(place, "")
            self._seen[place] = seen = before + text
            start = max(self._skip, len(before) - self._words.longest + 1)
            ends = [at + len(word) - len(before) for at, word in self._words.find(seen, start)]
            if ends:
                self._stopped.add(place)
            cut.append(text[: min(ends)] if ends else text)
        return cut
