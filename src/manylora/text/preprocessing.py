"""Preprocessor: inputs of the model `preprocessing` to its outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from manylora.errors import RequestError
from manylora.text.tokenizer import Tokenizer
from manylora.wire.server_types import Arrays
from manylora.wire.word_lists import encode_word_lists

REFUSED = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES")
WORDS = ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
MAX_WORDS = 16384  # of one request
WORD_COST = 16  # characters of text that take as long as one more word does, even an empty one


class Preprocessor:
    """context: tokens of the longest sequence that the engine takes; None: not known.

    Raises ConfigError where the tokenizer's directory cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer, add_special_tokens: bool, context: int | None) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._context = context
        self._decoder_start = tokenizer.decoder_start_id

    def length(self, inputs: Arrays) -> int:
        """Characters of all texts. Raises RequestError where there are too many, or an input is not taken."""
        for name in REFUSED:
            if name in inputs:
                raise RequestError(f"input {name} is not supported by this server: leave it out")
        prompts = [len(_text(prompt)) for prompt in inputs["QUERY"].reshape(-1)]
        for length in prompts:
            self._tokenizer.limits.check(length, self._context)
        words = [word for name in WORDS if name in inputs for word in inputs[name].reshape(-1)]
        if len(words) > MAX_WORDS:
            raise RequestError(
                f"bad_words, stop_words and embedding_bias_words must have at most {MAX_WORDS} words "
                f"together, got {len(words)}"
            )
        decoders = list(inputs["DECODER_QUERY"].reshape(-1)) if "DECODER_QUERY" in inputs else []
        others = sum(len(_text(text)) for text in [*words, *decoders])
        self._tokenizer.limits.check(others, self._context, whole=False)
        return sum(prompts) + others + WORD_COST * len(words)

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Outputs by name. Raises RequestError."""
        special = self._add_special_tokens
        prompts = [self._encode(text, special, self._context) for text in inputs["QUERY"].reshape(-1)]
        count, pad, end = len(prompts), self._tokenizer.pad_id or 0, self._tokenizer.eos_id
        ids, lengths = _padded(prompts, pad)
        decoder_ids, decoder_lengths = _padded(self._decoder_prompts(inputs, count, pad), pad)
        outputs = {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": decoder_ids,
            "REQUEST_DECODER_INPUT_LEN": decoder_lengths,
            "BAD_WORDS_IDS": self._word_lists(inputs.get("BAD_WORDS_DICT"), count),
            "STOP_WORDS_IDS": self._word_lists(inputs.get("STOP_WORDS_DICT"), count),
            "EMBEDDING_BIAS": self._biases(inputs, count),
            "REQUEST_OUTPUT_LEN": inputs["REQUEST_OUTPUT_LEN"],
            "OUT_END_ID": inputs.get("END_ID", np.full((count, 1), -1 if end is None else end, np.int32)),
            "OUT_PAD_ID": inputs.get("PAD_ID", np.full((count, 1), pad, np.int32)),
        }
        if "PROMPT_TABLE_EXTRA_ID" in inputs:
            virtual = ids >= self._tokenizer.vocab_size
            extra = inputs["PROMPT_TABLE_EXTRA_ID"].reshape(count, 1)
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.where(virtual, extra, 0).astype(np.uint64)
        return outputs

    def _decoder_prompts(self, inputs: Arrays, count: int, pad: int) -> list[list[int]]:
        """For an encoder-decoder model: the decoder's start id, and then the ids of its text."""
        texts = inputs.get("DECODER_QUERY")
        if texts is None:
            return [[pad if self._decoder_start is None else self._decoder_start]] * count
        if self._decoder_start is None:
            raise RequestError("decoder_text_input is for encoder-decoder models: leave it out")
        return [[self._decoder_start, *self._encode(text)] for text in texts.reshape(count)]

    def _word_lists(self, words: np.ndarray | None, count: int) -> np.ndarray:
        """[count, 2, L]; L is 0 without the input."""
        if words is None:
            return np.empty((count, 2, 0), np.int32)
        encoded = ([self._encode(word) for word in row if word] for row in words.reshape(count, -1))
        return encode_word_lists([[ids for ids in row if ids] for row in encoded])

    def _biases(self, inputs: Arrays, count: int) -> np.ndarray:
        """[count, vocab]: each weight added to every token of its word; [count, 0] without words."""
        words, weights = (inputs.get(f"EMBEDDING_BIAS_{name}") for name in ("WORDS", "WEIGHTS"))
        if words is None and weights is None:
            return np.empty((count, 0), np.float32)
        if words is None or weights is None or words.shape != weights.shape:
            raise RequestError(
                "embedding_bias_words and embedding_bias_weights must come together, of one shape"
            )
        table = np.zeros((count, self._tokenizer.vocab_size), np.float32)
        rows = zip(table, words.reshape(count, -1), weights.reshape(count, -1), strict=True)
        for biases, texts, values in rows:
            for text, value in zip(texts, values, strict=True):
                biases[self._encode(text)] += value
        return table

    def _encode(self, text: bytes | str, special: bool = False, context: int | None = None) -> list[int]:
        return self._tokenizer.encode(_text(text), special, context)


def _padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [count, longest] and lengths [count, 1]."""
    table = np.full((len(rows), max(map(len, rows))), pad, np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table, np.array([[len(row)] for row in rows], np.int32)


def _text(value: bytes | str) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise RequestError("text must be valid UTF-8") from None
