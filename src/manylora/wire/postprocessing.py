"""Postprocessor: converts inputs of the model `postprocessing` to texts."""

from __future__ import annotations

import logging

import numpy as np

from manylora.errors import AdapterError, RequestError
from manylora.generation.tokenizer import Tokenizer
from manylora.wire.item_text import OwnTexts, adapters_told
from manylora.wire.server_types import Arrays

MAX_TOKENS = 2**20  # maximum per request


logger = logging.getLogger("manylora")


class Postprocessor:
    """own: what comes with adapters; None: all use the base model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, own: OwnTexts | None = None) -> None:
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
        tokenizers = self._tokenizers(inputs, len(lengths))
        for item, row in enumerate(lengths.tolist()):
            tokenizer = tokenizers[item]
            for beam, length in enumerate(row):
                ids = _checked(tokens[item, beam, :length])
                if windows is None:
                    text = tokenizer.decode(ids, self._skip)
                else:
                    text = tokenizer.delta(_checked(windows[item, beam]), ids, final, self._skip)
                texts.append(text.encode())
        return tuple(texts)

    def _tokenizers(self, inputs: Arrays, count: int) -> list[Tokenizer]:
        """The tokenizers that preprocessing used for the same requests; it refuses those that cannot be read.
        Files that broke since then are no error here, because the ensemble would never free the request's
        resources.
        """
        if self._own is None:
            return [self._tokenizer] * count
        found = []
        for adapter in adapters_told(inputs, count):
            try:
                own = self._own.find(*adapter)
            except AdapterError as error:
                logger.error("decoded with the base model's tokenizer: %s", error)
                own = None
            found.append(self._tokenizer if own is None else own.tokenizer)
        return found


def _checked(row: np.ndarray) -> list[int]:
    ids = row.tolist()
    if ids and min(ids) < 0:
        raise RequestError("TOKENS_BATCH and PREVIOUS_IDS must hold token ids, which are 0 or more")
    return ids
