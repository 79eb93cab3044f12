"""The models that only process text: `preprocessing` and `postprocessing`. TextWorker answers their requests;
long texts are processed on other threads, so that short ones do not wait.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manylora.config.model_folder import model_folder
from manylora.config.repository import value_of
from manylora.doors.triton.bls import TO_PREPROCESSING
from manylora.doors.triton.server_types import (
    FINAL,
    Arrays,
    Response,
    ResponseSender,
    ServerRequest,
    check_parameters,
    client_message,
    encode_word_lists,
    refuse,
    send,
    utf8,
)
from manylora.doors.triton.shape_guard import read_inputs
from manylora.errors import AdapterError, ConfigError, RequestError
from manylora.generation.defaults import NO_DEFAULTS, OwnText
from manylora.generation.tokenizer import Tokenizer
from manylora.system.lifeline import Lifeline
from manylora.system.threads import LONG, TextThreads

if TYPE_CHECKING:
    from manylora.adapters.catalog.texts import RepositoryTexts

logger = logging.getLogger("manylora")

REFUSED = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES")
TOLD = "LORA_TEXT"  # input of postprocessing: the result of `adapter_told`
WORDS = ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
SENT_AS = {ours: sent for sent, ours in TO_PREPROCESSING.items()}  # names of inputs in text requests
MAX_WORDS = 16384  # maximum per request
WORD_COST = 16  # a word, even an empty one, takes as long as this many characters
MAX_TOKENS = 2**20  # maximum per request of postprocessing


class TextWorker:
    """name: the model's, for the log. lifeline: gets the number of open requests. length: of a request's
    texts, in characters or tokens; raises RequestError. respond, fail: make the response to inputs, errors.
    """

    def __init__(
        self,
        name: str,
        lifeline: Lifeline,
        length: Callable[[Arrays], int],
        respond: Callable[[Arrays], Response],
        fail: Callable[[str], Response],
    ) -> None:
        self._name, self._lifeline = name, lifeline
        self._length, self._respond, self._fail = length, respond, fail
        self._threads = TextThreads()

    def execute(self, requests: Sequence[ServerRequest]) -> list[Response | None]:
        """The return value of a model's `execute`. None: the response is sent later."""
        with self._lifeline.busy():
            return [self._answer(request) for request in requests]

    def close(self) -> None:
        self._threads.close()

    def _answer(self, request: ServerRequest) -> Response | None:
        try:
            check_parameters(request.parameters(), log=False)
            inputs = read_inputs(request.inputs())
            threads = self._threads.executor(self._length(inputs))
        except Exception as error:
            return self._fail(client_message(error, self._name))
        if threads is None:
            return self._response(inputs)
        busy = ExitStack()
        busy.enter_context(self._lifeline.busy())
        threads.submit(self._send, request.get_response_sender(), inputs, busy)
        return None

    def _send(self, sender: ResponseSender, inputs: Arrays, busy: ExitStack) -> None:
        with busy:
            try:
                send(sender, self._response(inputs), FINAL)
            except Exception as error:
                client_message(error, self._name)  # only logged: this client cannot be told

    def _response(self, inputs: Arrays) -> Response:
        try:
            return self._respond(inputs)
        except Exception as error:
            return self._fail(client_message(error, self._name))


def open_tokenizer(parameters: Mapping[str, str]) -> Tokenizer:
    """The tokenizer that a model's parameters name. Raises ConfigError."""
    directory = value_of(parameters, "tokenizer_dir")
    if directory is None:
        raise ConfigError("parameter tokenizer_dir must name the tokenizer's directory")
    try:
        return Tokenizer(model_folder(Path(directory)))
    except ConfigError as error:
        raise ConfigError(f"parameter tokenizer_dir: {error}") from error


class Preprocessor:
    """context: most tokens of a sequence; None: unknown. own: what comes with adapters, if trusted."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        add_special_tokens: bool,
        context: int | None,
        own: RepositoryTexts | None = None,
    ) -> None:
        self._tokenizer, self._own = tokenizer, own
        self._add_special_tokens, self._context = add_special_tokens, context

    def length(self, inputs: Arrays) -> int:
        """Characters of all texts. Raises RequestError for too many, and for unsupported inputs."""
        refuse(inputs, *REFUSED)
        prompts = [len(text) for text in _sent(inputs, "QUERY").reshape(-1)]
        adapters = adapters_of(inputs, len(prompts)) if self._own else []
        for index, length in enumerate(prompts):
            # With another tokenizer more may fit: then `run` checks it.
            whole = not adapters or adapters[index] == (None, None)
            self._tokenizer.check_length(length, self._context, whole)
        reading = LONG * sum(not self._own.is_at_hand(*one) for one in set(adapters)) if self._own else 0
        words = [word for name in WORDS for word in _sent(inputs, name).reshape(-1)]
        if len(words) > MAX_WORDS:
            raise RequestError(
                f"bad_words, stop_words and embedding_bias_words must have at most {MAX_WORDS} words "
                f"together, got {len(words)}"
            )
        others = sum(map(len, [*words, *_sent(inputs, "DECODER_QUERY").reshape(-1)]))
        self._tokenizer.check_length(others, self._context, whole=False)
        return sum(prompts) + others + WORD_COST * len(words) + reading

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Outputs by name. Raises RequestError."""
        special, queries = self._add_special_tokens, list(_sent(inputs, "QUERY").reshape(-1))
        count, pad, start = len(queries), self._tokenizer.pad_id or 0, self._tokenizer.decoder_start_id
        base = OwnText(self._tokenizer, NO_DEFAULTS)
        texts = [base] * count
        if self._own is not None:
            texts = [self._own.find(*adapter) or base for adapter in adapters_of(inputs, count)]
        prompts = [
            text.tokenizer.encode(query, special, self._context)
            for text, query in zip(texts, queries, strict=True)
        ]
        # The first end id is the engine's, which is never part of an output.
        ends = []
        for text in texts:
            named = text.tokenizer.eos_id
            ids = [*(text.defaults.end_ids or ()), *([] if named is None else [named])]
            ends.append(list(dict.fromkeys(ids)))
        # For an encoder-decoder model: the decoder's start id, followed by the ids of its text.
        decoder_prompts = [[pad if start is None else start]] * count
        if "DECODER_QUERY" in inputs:
            if start is None:
                raise RequestError("decoder_text_input is for encoder-decoder models: leave it out")
            pairs = zip(texts, _sent(inputs, "DECODER_QUERY").reshape(-1), strict=True)
            decoder_prompts = [[start, *_encode(text, query)] for text, query in pairs]
        prompt_ids, lengths = _padded(prompts, pad)
        decoder_ids, decoder_lengths = _padded(decoder_prompts, pad)
        defaults = [_sampling_defaults(text) for text in texts]
        outputs = {
            "INPUT_ID": prompt_ids,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": decoder_ids,
            "REQUEST_DECODER_INPUT_LEN": decoder_lengths,
            "BAD_WORDS_IDS": encode_word_lists(_words(inputs, "BAD_WORDS_DICT", texts), count),
            "STOP_WORDS_IDS": encode_word_lists(_stops(inputs, texts, ends), count),
            "EMBEDDING_BIAS": self._biases(inputs, texts),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
            "OUT_END_ID": inputs.get("END_ID", np.array([one[:1] or [-1] for one in ends], np.int32)),
            "OUT_SAMPLING_DEFAULTS": np.array(defaults, np.object_).reshape(count, 1),
            "OUT_PAD_ID": inputs.get("PAD_ID", np.full((count, 1), pad, np.int32)),
        }
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            virtual = prompt_ids >= self._tokenizer.vocab_size
            extra = inputs["PROMPT_TABLE_EXTRA_ID"].reshape(count, 1)
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.where(virtual, extra, 0).astype(np.uint64)
        return outputs

    def _biases(self, inputs: Arrays, items: Sequence[OwnText]) -> np.ndarray:
        """[count, vocab]: each weight, added to all tokens of its word. [count, 0] without words."""
        count = len(items)
        words, weights = (inputs.get(f"EMBEDDING_BIAS_{name}") for name in ("WORDS", "WEIGHTS"))
        if words is None and weights is None:
            return np.empty((count, 0), np.float32)
        if words is None or weights is None or words.shape != weights.shape:
            raise RequestError(
                "embedding_bias_words and embedding_bias_weights must come together, of one shape"
            )
        words = _sent(inputs, "EMBEDDING_BIAS_WORDS")
        table = np.zeros((count, max(one.tokenizer.vocab_size for one in items)), np.float32)
        rows = zip(items, table, words.reshape(count, -1), weights.reshape(count, -1), strict=True)
        for item, biases, texts, values in rows:
            for text, value in zip(texts, values, strict=True):
                biases[_encode(item, text)] += value
        return table


def adapters_of(inputs: Arrays, count: int) -> list[tuple[str | None, int | None]]:
    """Name and task id in each item. Raises RequestError."""
    names, ids = (_column(inputs, name, count) for name in ("LORA_NAME", "LORA_TASK_ID"))
    decoded = [None if one is None else utf8(one, "lora_name") or None for one in names]
    return list(zip(decoded, ids, strict=True))


def _told(given: bytes | str | None) -> tuple[str | None, int | None]:
    text = given.decode(errors="replace") if isinstance(given, bytes) else given or ""
    kind, _, value = text.partition(" ")
    if kind == "name":
        return value, None
    return None, int(value) if kind == "id" and value.isascii() and value.isdigit() else None


def _column(inputs: Arrays, name: str, count: int) -> list[Any]:
    if name not in inputs:
        return [None] * count
    if inputs[name].size != count:
        raise RequestError(f"{name} must have one value for each text, got {inputs[name].size} for {count}")
    return inputs[name].reshape(-1).tolist()


Words = list[list[list[int]]]
"""Token ids of the words of each item."""


def _sent(inputs: Arrays, name: str) -> np.ndarray:
    """The texts of an input, in its shape. Empty if it is absent. Raises RequestError."""
    given = inputs.get(name, np.empty(0, np.object_))
    found = [utf8(text, f"{SENT_AS[name]} ({name})") for text in given.reshape(-1)]
    return np.array(found, np.object_).reshape(given.shape)


def _encode(item: OwnText, text: str) -> list[int]:
    return item.tokenizer.encode(text, add_special_tokens=False)


def _words(inputs: Arrays, name: str, items: Sequence[OwnText]) -> Words | None:
    """None: there is no such input."""
    if name not in inputs:
        return None
    rows = zip(items, _sent(inputs, name).reshape(len(items), -1), strict=True)
    return [[ids for word in row if word and (ids := _encode(item, word))] for item, row in rows]


def _stops(inputs: Arrays, items: Sequence[OwnText], ends: Sequence[Sequence[int]]) -> Words | None:
    given, asked = _words(inputs, "STOP_WORDS_DICT", items), "END_ID" in inputs
    found = []
    for index, (item, end_ids) in enumerate(zip(items, ends, strict=True)):
        fields = item.defaults.fields
        own = [_encode(item, word) for word in fields.get("stop", ())] if given is None else given[index]
        more = [*fields.get("stop_token_ids", ()), *(() if asked else end_ids[1:])]
        found.append([ids for ids in [*own, *([token] for token in more)] if ids])
    return found if given is not None or any(found) else None


def _sampling_defaults(text: OwnText) -> bytes:
    fields = {k: v for k, v in text.defaults.fields.items() if k not in ("stop", "stop_token_ids")}
    if fields.get("top_p") == 0:
        fields |= {"top_p": 1.0, "top_k": 1}  # greedy
    elif "top_k" in fields:
        fields["top_k"] = max(0, fields["top_k"])
    if fields.get("temperature") and not (fields.get("top_k") or "top_p" in fields):
        fields["top_p"] = 1.0  # the engine samples only if top_k or top_p ask for it
    return json.dumps(fields).encode() if fields else b""


def _padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [count, longest] and lengths [count, 1]."""
    table = np.full((len(rows), max(map(len, rows))), pad, np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table, np.array([[len(row)] for row in rows], np.int32)


class Postprocessor:
    """skip: leave special tokens out. own: what comes with adapters; None: the base model's tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, own: RepositoryTexts | None = None
    ) -> None:
        self._tokenizer, self._own = tokenizer, own
        self._skip = skip_special_tokens

    def length(self, inputs: Arrays) -> int:
        """Tokens of all sequences. Raises RequestError if there are too many, or if shapes do not match."""
        tokens, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
        windows = inputs.get("PREVIOUS_IDS")
        if tokens.shape[:2] != lengths.shape or (windows is not None and windows.shape[:2] != lengths.shape):
            raise RequestError(
                "TOKENS_BATCH, SEQUENCE_LENGTH and PREVIOUS_IDS must have one shape up to the beams, got "
                f"{tokens.shape}, {lengths.shape} and {None if windows is None else windows.shape}"
            )
        longest, count = tokens.shape[2], 0 if windows is None else windows.size
        for length in lengths.reshape(-1).tolist():
            if not 0 <= length <= longest:
                raise RequestError(f"SEQUENCE_LENGTH must be in [0, {longest}], the tokens of TOKENS_BATCH")
            count += length
        if count > MAX_TOKENS:
            raise RequestError(f"at most {MAX_TOKENS} tokens are decoded in one request, got {count}")
        return count

    def run(self, inputs: Arrays) -> tuple[bytes, ...]:
        """One text per beam of each item, in UTF-8. In a stream, where earlier ids are given, exactly the
        text that the new ids add. Raises RequestError.
        """
        tokens, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
        windows, final = inputs.get("PREVIOUS_IDS"), "FINISH_REASON" in inputs
        texts = []
        adapters = _column(inputs, TOLD, len(lengths)) if self._own is not None else []
        for item, row in enumerate(lengths.tolist()):
            tokenizer = self._tokenizer
            if self._own is not None:
                try:
                    own = self._own.find(*_told(adapters[item]))
                    tokenizer = tokenizer if own is None else own.tokenizer
                except AdapterError as error:
                    # Preprocessing could read it. An error here would never free the ensemble's resources.
                    logger.error("decoded with the base model's tokenizer: %s", error)
            for beam, length in enumerate(row):
                ids = _checked(tokens[item, beam, :length])
                if windows is None:
                    text = tokenizer.decode(ids, self._skip)
                else:
                    text = tokenizer.delta(_checked(windows[item, beam]), ids, final, self._skip)
                texts.append(text.encode())
        return tuple(texts)


def _checked(row: np.ndarray) -> list[int]:
    ids = row.tolist()
    if ids and min(ids) < 0:
        raise RequestError("TOKENS_BATCH and PREVIOUS_IDS must hold token ids, which are 0 or more")
    return ids
