"""Texts and lists of words as tensors. Stop and bad words are one [2, L] per request: ids in row 0,
cumulative ends in row 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from manylora.errors import RequestError
from manylora.request import MAX_WORD_TOKENS


def utf8(value: bytes | str, name: str) -> str:
    """One value of a text tensor. name: the client's name of the input. Raises RequestError."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise RequestError(f"{name} must be valid UTF-8") from None


def encode_word_lists(requests: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """Token ids of each word of each request as [requests, 2, L] int32; ids end in 0, ends in -1."""
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
