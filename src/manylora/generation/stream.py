"""Incremental detokenisation of one output. The pieces of text concatenate to the text of all ids."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW = 128  # ids before a chunk that its text may depend on; only a longer run of byte tokens needs more
LONG = 16  # ids from which a window is cut back to its suffix
POSITIONAL = ("WordPiece", "Metaspace", "BPEDecoder", "CTC")  # depend on a token's place or neighbour
EACH = ("ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip")  # do not, or make bytes of tokens


@dataclass(frozen=True)
class DecoderRules:
    """What the text of a token depends on, from the `decoder` of a tokenizer.json.

    byte_level: tokens are bytes. only_bytes: and nothing else is done to them. byte_tokens: tokens such as
    `<0xE2>` are bytes. last: whether another token follows changes it. stripped: the text loses characters at
    its start. whole: no rule says which part of the text is final; all of it is held back until the end.
    """

    byte_level: bool = False
    only_bytes: bool = False
    byte_tokens: bool = False
    last: bool = False
    stripped: bool = False
    whole: bool = False

    @classmethod
    def of(cls, decoder: Mapping[str, Any] | None) -> DecoderRules:
        steps = _steps(decoder)
        kinds = [step["type"] for step in steps]
        end = next((i + 1 for i, kind in enumerate(kinds) if kind in ("Fuse", "ByteLevel")), len(kinds))
        each, fused = steps[:end], [step for step in steps[end:] if step["type"] != "Fuse"]
        rules = cls(
            byte_level="ByteLevel" in kinds,
            only_bytes=kinds == ["ByteLevel"],
            byte_tokens="ByteFallback" in kinds,
            last="BPEDecoder" in kinds,
            stripped=bool(fused),
        )
        certain = (
            all(kind in (*POSITIONAL, *EACH) for kind in kinds)
            and sum(kind in POSITIONAL for kind in kinds) <= 1
            and all(step["type"] == "Strip" and not step["stop"] for step in fused)
            and "ByteLevel" not in kinds[1:]
            and (not rules.byte_tokens or all(map(_keeps_bytes, each[: kinds.index("ByteFallback")])))
            and not (rules.byte_tokens and any(kind in kinds for kind in ("BPEDecoder", "CTC")))
        )
        return rules if certain else cls(whole=True)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a decoder, in order."""
    if not decoder:
        return []
    if decoder["type"] == "Sequence":
        return [step for one in decoder["decoders"] for step in _steps(one)]
    return [decoder]


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    """Whether a step leaves tokens such as `<0xE2>` as they are, and makes none."""
    if step["type"] != "Replace":
        return False
    found: str = step["pattern"].get("String") or "a"  # a regular expression may find anything
    return not found.isascii() and len(step["content"]) <= 1


class ByteStream:
    """Every id is bytes of UTF-8 (`bytes_of`), so that only an incomplete character is held back."""

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: Container[int]) -> None:
        self._bytes_of, self._skipped = bytes_of, skipped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, ids: Sequence[int], final: bool) -> str:
        """The text that later ids cannot change any more. With `final`, all remaining text."""
        bytes_of, skipped = self._bytes_of, self._skipped
        return self._decode(b"".join([bytes_of(i) for i in ids if i not in skipped]), final)


class WindowStream:
    """For any tokenizer: a window of the last ids is decoded again with the new ones.

    stable: from ids to the final part of their text. whole: to their full text. suffix: the end of a window
    that determines the transition to what follows. is_shown: others would make the window grow forever.
    """

    def __init__(
        self,
        stable: Callable[[Sequence[int]], str],
        whole: Callable[[Sequence[int]], str],
        suffix: Callable[[Sequence[int]], Sequence[int]],
        is_shown: Callable[[int], bool],
    ) -> None:
        self._stable, self._whole, self._suffix, self._is_shown = stable, whole, suffix, is_shown
        self._window: list[int] = []
        self._shown = ""  # final text of the window's ids

    def add(self, ids: Sequence[int], final: bool) -> str:
        new = [i for i in ids if self._is_shown(i)]
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
