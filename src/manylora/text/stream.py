"""Incremental detokenisation of one output. The pieces of text concatenate to the text of all ids."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence

LONG = 16  # ids from which a window is cut back to its suffix


class ByteStream:
    """For byte-level tokenizers: every id is bytes of UTF-8, so only an incomplete character is held back.

    bytes_of: returns an id's bytes, empty for an id without token. skipped: ids that are not shown.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: Container[int]) -> None:
        self._bytes_of, self._skipped = bytes_of, skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, ids: Sequence[int], final: bool) -> str:
        """The text that later ids cannot change any more. With `final`, all remaining text."""
        bytes_of, skipped = self._bytes_of, self._skipped
        return self._decode(b"".join([bytes_of(i) for i in ids if i not in skipped]), final)


class WindowStream:
    """For any tokenizer: a window of the last ids is decoded again with the new ones.

    stable:  from ids to the part of their text that cannot change any more. whole: to their full text.
    suffix:  the end of a window that determines the transition to what follows.
    skipped: ids that are not shown. has_token: whether an id has a token; others would make the window grow
    forever.
    """

    def __init__(
        self,
        stable: Callable[[Sequence[int]], str],
        whole: Callable[[Sequence[int]], str],
        suffix: Callable[[Sequence[int]], Sequence[int]],
        skipped: Container[int],
        has_token: Callable[[int], bool],
    ) -> None:
        self._stable, self._whole, self._suffix = stable, whole, suffix
        self._skipped, self._has_token = skipped, has_token
        self._window: list[int] = []
        self._shown = ""  # final text of the window's ids

    def add(self, ids: Sequence[int], final: bool) -> str:
        new = [i for i in ids if i not in self._skipped and self._has_token(i)]
        if not (new or final):
            return ""
        self._window += new
        text = self._whole(self._window) if final else self._stable(self._window)
        settled = text[len(self._shown) :]
        self._shown = text
        if settled and len(self._window) > LONG:
            self._window = list(self._suffix(self._window))
            self._shown = self._stable(self._window)
        return settled


TextStream = ByteStream | WindowStream
