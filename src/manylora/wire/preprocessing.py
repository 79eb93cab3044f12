"""Preprocessor: converts inputs of the model `preprocessing` to its outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from manylora.errors import RequestError
from manylora.generation.tokenizer import Tokenizer
from manylora.system.text_threads import LONG
from manylora.wire.bls import TO_PREPROCESSING
from manylora.wire.item_text import ItemText, OwnTexts, adapters_of
from manylora.wire.server_types import Arrays
from manylora.wire.texts import encode_word_lists, utf8

REFUSED = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES")
WORDS = ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
SENT_AS = {ours: sent for sent, ours in TO_PREPROCESSING.items()}  # names of inputs in text requests
MAX_WORDS = 16384  # maximum per request
WORD_COST = 16  # a word, even an empty one, takes as long as this many characters


class Preprocessor:
    """context: maximum sequence length of the engine; None: unknown. own: what comes with adapters; None: all
    use the base model's text.

    Raises ConfigError if the tokenizer's directory cannot be read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        add_special_tokens: bool,
        context: int | None,
        own: OwnTexts | None = None,
    ) -> None:
        self._tokenizer, self._own = tokenizer, own
        self._add_special_tokens = add_special_tokens
        self._context = context
        self._decoder_start = tokenizer.decoder_start_id

    def length(self, inputs: Arrays) -> int:
        """Characters of all texts. Raises RequestError if there are too many, or for an input that is not
        supported.
        """
        for name in REFUSED:
            if name in inputs:
                raise RequestError(f"input {name} is not supported by this server: leave it out")
        prompts = [len(text) for text in _sent(inputs, "QUERY").reshape(-1)]
        adapters = adapters_of(inputs, len(prompts)) if self._own else []
        for index, length in enumerate(prompts):
            # With another tokenizer more may fit: then `run` checks it.
            whole = not adapters or adapters[index] == (None, None)
            self._tokenizer.limits.check(length, self._context, whole)
        reading = LONG * sum(not self._own.is_at_hand(*one) for one in set(adapters)) if self._own else 0
        words = [word for name in WORDS for word in _sent(inputs, name).reshape(-1)]
        if len(words) > MAX_WORDS:
            raise RequestError(
                f"bad_words, stop_words and embedding_bias_words must have at most {MAX_WORDS} words "
                f"together, got {len(words)}"
            )
        others = sum(map(len, [*words, *_sent(inputs, "DECODER_QUERY").reshape(-1)]))
        self._tokenizer.limits.check(others, self._context, whole=False)
        return sum(prompts) + others + WORD_COST * len(words) + reading

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Outputs by name. Raises RequestError."""
        special, queries = self._add_special_tokens, list(_sent(inputs, "QUERY").reshape(-1))
        count, pad = len(queries), self._tokenizer.pad_id or 0
        texts = self._texts(inputs, count)
        prompts = [
            text.tokenizer.encode(query, special, self._context)
            for text, query in zip(texts, queries, strict=True)
        ]
        ends = [_end_ids(text) for text in texts]
        ids, lengths = _padded(prompts, pad)
        decoder_ids, decoder_lengths = _padded(self._decoder_prompts(inputs, texts, pad), pad)
        outputs = {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": decoder_ids,
            "REQUEST_DECODER_INPUT_LEN": decoder_lengths,
            "BAD_WORDS_IDS": _word_lists(_words(inputs, "BAD_WORDS_DICT", texts), count),
            "STOP_WORDS_IDS": _word_lists(_stops(inputs, texts, ends), count),
            "EMBEDDING_BIAS": self._biases(inputs, texts),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
            "OUT_END_ID": inputs.get("END_ID", np.array([one[:1] or [-1] for one in ends], np.int32)),
            "OUT_SAMPLING_DEFAULTS": np.array([[_json(one.sampling)] for one in texts], np.object_),
            "OUT_PAD_ID": inputs.get("PAD_ID", np.full((count, 1), pad, np.int32)),
        }
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            virtual = ids >= self._tokenizer.vocab_size
            extra = inputs["PROMPT_TABLE_EXTRA_ID"].reshape(count, 1)
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.where(virtual, extra, 0).astype(np.uint64)
        return outputs

    def _texts(self, inputs: Arrays, count: int) -> list[ItemText]:
        """How the text of each item is processed. Raises AdapterInvalidError."""
        base = ItemText(self._tokenizer)
        if self._own is None:
            return [base] * count
        found = [self._own.find(*one) for one in adapters_of(inputs, count)]
        return [base if own is None else ItemText.of(own) for own in found]

    def _decoder_prompts(self, inputs: Arrays, items: Sequence[ItemText], pad: int) -> list[list[int]]:
        """For an encoder-decoder model: the decoder's start id, followed by the ids of its text."""
        if "DECODER_QUERY" not in inputs:
            return [[pad if self._decoder_start is None else self._decoder_start]] * len(items)
        if self._decoder_start is None:
            raise RequestError("decoder_text_input is for encoder-decoder models: leave it out")
        pairs = zip(items, _sent(inputs, "DECODER_QUERY").reshape(-1), strict=True)
        return [[self._decoder_start, *_encode(item, text)] for item, text in pairs]

    def _biases(self, inputs: Arrays, items: Sequence[ItemText]) -> np.ndarray:
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


Words = list[list[list[int]]]
"""Token ids of the words of each item."""


def _sent(inputs: Arrays, name: str) -> np.ndarray:
    """The texts of an input, in its shape. Empty if it is absent. Raises RequestError."""
    given = inputs.get(name, np.empty(0, np.object_))
    found = [utf8(text, f"{SENT_AS[name]} ({name})") for text in given.reshape(-1)]
    return np.array(found, np.object_).reshape(given.shape)


def _encode(item: ItemText, text: str) -> list[int]:
    return item.tokenizer.encode(text, add_special_tokens=False)


def _words(inputs: Arrays, name: str, items: Sequence[ItemText]) -> Words | None:
    """None: there is no such input."""
    if name not in inputs:
        return None
    rows = zip(items, _sent(inputs, name).reshape(len(items), -1), strict=True)
    return [[ids for word in row if word and (ids := _encode(item, word))] for item, row in rows]


def _stops(inputs: Arrays, items: Sequence[ItemText], ends: Sequence[Sequence[int]]) -> Words | None:
    """Stop words, including those of the adapter."""
    given, asked = _words(inputs, "STOP_WORDS_DICT", items), "END_ID" in inputs
    found = []
    for index, (item, end_ids) in enumerate(zip(items, ends, strict=True)):
        own = [_encode(item, word) for word in item.stop] if given is None else given[index]
        more = [*item.stop_ids, *(() if asked else end_ids[1:])]
        found.append([ids for ids in [*own, *([token] for token in more)] if ids])
    return found if given is not None or any(found) else None


def _word_lists(words: Words | None, count: int) -> np.ndarray:
    """[count, 2, L]; L is 0 without words."""
    return np.empty((count, 2, 0), np.int32) if words is None else encode_word_lists(words)


def _end_ids(item: ItemText) -> list[int]:
    """End ids. The first is the engine's end id, which is never part of an output."""
    named = item.tokenizer.eos_id
    return list(dict.fromkeys([*item.end_ids, *([] if named is None else [named])]))


def _json(sampling: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(sampling)).encode() if sampling else b""


def _padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [count, longest] and lengths [count, 1]."""
    table = np.full((len(rows), max(map(len, rows))), pad, np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table, np.array([[len(row)] for row in rows], np.int32)
