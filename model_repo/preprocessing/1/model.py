"""Text to token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from manylora.errors import ConfigError, RequestError
from manylora.system.lifeline import Lifeline
from manylora.text.tokenizer import open_tokenizer
from manylora.wire.context_length import engine_context
from manylora.wire.parameters import flag, parameters_of
from manylora.wire.shape_guard import check_shapes
from manylora.wire.text_worker import Desk

REFUSED = ("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES")
WORDS = ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
MAX_WORDS = 16384  # of one request
WORD = 16  # characters of a text that take as long as a word does, be it empty


class TritonPythonModel:
    def initialize(self, args):
        self._lifeline = Lifeline(args["model_instance_name"])
        check_shapes(pb_utils)
        parameters = parameters_of(args["model_config"])
        try:
            self._tokenizer = open_tokenizer(parameters)
            self._add_special_tokens = flag(parameters, "add_special_tokens", True)
            self._decoder_start = self._tokenizer.decoder_start_id
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._context = engine_context(Path(args["model_repository"]))
        self._desk = Desk("preprocessing", self._lifeline, pb_utils, self._measure, self._work)

    def execute(self, requests):
        return self._desk.answer(requests)

    def finalize(self):
        self._desk.close()

    def _measure(self, arrays):
        """Characters of all texts."""
        for name in REFUSED:
            if name in arrays:
                raise RequestError(f"input {name} is not supported by this server: leave it out")
        prompts = [len(_text(row)) for row in arrays["QUERY"].reshape(-1)]
        for length in prompts:
            self._tokenizer.check_length(length, self._context)
        words = [word for name in WORDS if name in arrays for word in arrays[name].reshape(-1)]
        if len(words) > MAX_WORDS:
            raise RequestError(
                f"bad_words, stop_words and embedding_bias_words must have at most {MAX_WORDS} words "
                f"together, got {len(words)}"
            )
        decoders = list(arrays["DECODER_QUERY"].reshape(-1)) if "DECODER_QUERY" in arrays else []
        others = sum(len(_text(text)) for text in [*words, *decoders])
        self._tokenizer.check_length(others, self._context, whole=False)
        return sum(prompts) + others + WORD * len(words)

    def _work(self, arrays):
        return [pb_utils.Tensor(name, value) for name, value in self._outputs(arrays).items()]

    def _outputs(self, arrays):
        special = self._add_special_tokens
        prompts = [self._encode(row, special, self._context) for row in arrays["QUERY"].reshape(-1)]
        count, pad = len(prompts), self._tokenizer.pad_id or 0
        end = self._tokenizer.eos_id
        ids, lengths = self._table(prompts, pad)
        decoder_ids, decoder_lengths = self._table(self._decoder_prompts(arrays, count, pad), pad)
        ones = np.ones((count, 1), np.int32)
        outputs = {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": decoder_ids,
            "REQUEST_DECODER_INPUT_LEN": decoder_lengths,
            "BAD_WORDS_IDS": self._words(arrays.get("BAD_WORDS_DICT"), count),
            "STOP_WORDS_IDS": self._words(arrays.get("STOP_WORDS_DICT"), count),
            "EMBEDDING_BIAS": self._bias(arrays, count),
            "REQUEST_OUTPUT_LEN": arrays["REQUEST_OUTPUT_LEN"],
            "OUT_END_ID": arrays.get("END_ID", ones * (-1 if end is None else end)),
            "OUT_PAD_ID": arrays.get("PAD_ID", ones * pad),
        }
        if "PROMPT_TABLE_EXTRA_ID" in arrays:
            virtual = ids >= self._tokenizer.vocab_size
            extra = arrays["PROMPT_TABLE_EXTRA_ID"].reshape(count, 1)
            outputs["OUT_PROMPT_TABLE_EXTRA_IDS"] = np.where(virtual, extra, 0).astype(np.uint64)
        return outputs

    def _decoder_prompts(self, arrays, count, pad):
        """What an encoder-decoder model's decoder goes on from: its start, and text, nothing behind it."""
        texts = arrays.get("DECODER_QUERY")
        if texts is None:
            return [[pad if self._decoder_start is None else self._decoder_start]] * count
        if self._decoder_start is None:
            raise RequestError("decoder_text_input is for encoder-decoder models: leave it out")
        return [[self._decoder_start, *self._encode(text, False)] for text in texts.reshape(count)]

    def _table(self, rows, pad):
        """Ids [count, longest] and lengths [count, 1]."""
        table = np.full((len(rows), max(map(len, rows))), pad, np.int32)
        for line, row in zip(table, rows, strict=True):
            line[: len(row)] = row
        return table, np.array([[len(row)] for row in rows], np.int32)

    def _bias(self, arrays, count):
        """[count, vocab]: each weight added to every token of its word; [count, 0] without words."""
        words, weights = (arrays.get(f"EMBEDDING_BIAS_{name}") for name in ("WORDS", "WEIGHTS"))
        if words is None and weights is None:
            return np.empty((count, 0), np.float32)
        if words is None or weights is None or words.shape != weights.shape:
            raise RequestError(
                "embedding_bias_words and embedding_bias_weights must come together, of one shape"
            )
        table = np.zeros((count, self._tokenizer.vocab_size), np.float32)
        pairs = zip(words.reshape(count, -1), weights.reshape(count, -1), strict=True)
        for row, (texts, values) in zip(table, pairs, strict=True):
            for text, value in zip(texts, values, strict=True):
                row[self._encode(text, False)] += value
        return table

    def _words(self, array, count):
        """[count, 2, L]: ids of all words, and their running ends; padded with 0 and -1."""
        if array is None:
            return np.empty((count, 2, 0), np.int32)
        rows = []
        for words in array.reshape(count, -1):
            encoded = [self._encode(word, False) for word in words if word]
            encoded = [ids for ids in encoded if ids]
            rows.append(([i for ids in encoded for i in ids], np.cumsum([len(ids) for ids in encoded])))
        width = max(1, *(len(ids) for ids, _ in rows))
        table = np.zeros((count, 2, width), np.int32)
        table[:, 1] = -1
        for row, (ids, ends) in zip(table, rows, strict=True):
            row[0, : len(ids)] = ids
            row[1, : len(ends)] = ends
        return table

    def _encode(self, text, special, context=None):
        return self._tokenizer.encode(_text(text), special, context)


def _text(value):
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise RequestError("text must be valid UTF-8") from None
