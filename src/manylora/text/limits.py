"""Limits on the length of texts, checked before tokenisation, based on the longest token of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from manylora.errors import TextTooLongError

# Characters. Texts up to FREE are always tokenised, so that an error can give their number of tokens.
FREE = 2**14
LONGEST_TEXT = 2**19  # if the minimum number of tokens of a text is unknown
GENEROUS = 16  # per token, four times as many as in English
ASSUMED = 128  # per token, if a tokenizer has no bound: it drops text, or merges runs
COMPOSED = 4  # maximum that NFC composes to one

KEEP_ALL = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")  # pre-tokenizers
KEEP_UNLESS_REMOVED = ("Split", "Punctuation")
# By normalizer: the most characters that become one.
FACTORS = dict.fromkeys(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"), 1)
FACTORS |= {"NFC": COMPOSED, "NFKC": COMPOSED}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class TextLimits:
    """per_token: the most characters that one token represents."""

    def __init__(self, per_token: int | None) -> None:
        self.per_token = per_token or ASSUMED

    def check(self, length: int, context: int | None, whole: bool = True) -> None:
        """Raises TextTooLongError if a text of this length must have more than `context` tokens.

        context: None: unknown. whole: False: the text need not fit the context. In both cases the limit is
        `longest_text`.
        """
        if context is None or not whole:
            most = longest_text(context)
            if length > most:
                raise TextTooLongError(f"The text has {length} characters: at most {most} are taken")
            return
        most = max(context * self.per_token, FREE)
        if length > most:
            raise TextTooLongError(
                f"The text has {length} characters: in the context of {context} tokens there is room for "
                f"{most} at most"
            )

    def probe(self, text: str, context: int, count: Callable[[str], int]) -> None:
        """Raises TextTooLongError if the start of a text already has clearly more than `context` tokens.

        This is cheaper than tokenising all of it. A text whose length usually fits is not checked. count:
        returns the number of tokens of a text.
        """
        size = max(FREE, 4 * context)
        while 2 * size <= len(text):
            tokens = count(text[:size])
            if tokens > context + context // 4:  # the cut affects only the last tokens
                raise TextTooLongError(
                    f"The first {size} of the text's {len(text)} characters have {tokens} tokens already: "
                    f"the context has room for {context}"
                )
            size *= 2


def longest_text(context: int | None) -> int:
    """Limit in characters for a text that need not fit the context: more than what usually fits."""
    return max(LONGEST_TEXT, GENEROUS * (context or 0))


def most_listed(context: int) -> int:
    """Maximum length of a token list. Creating it blocks other threads, unlike tokenising."""
    return max(context, FREE)


def characters_per_token(spec: Mapping[str, Any]) -> int | None:
    """The most characters of a text that one token can represent.

    None: any number, because a normalizer or pre-tokenizer drops some, or one token represents a run of
    unknown characters.
    spec: a tokenizer.json. Counts characters, not bytes, because normal forms change the number of bytes both
    ways.
    """
    added = spec.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    shrink = _shrink(spec.get("normalizer"))
    longest = _longest(spec)
    if shrink is None or longest is None or not _keeps(spec.get("pre_tokenizer")):
        return None
    return shrink * max([longest, *(len(token.get("content", "")) for token in added)])


def _longest(spec: Mapping[str, Any]) -> int | None:
    """Characters of the longest token. None if the model may drop or merge unknown characters."""
    model = spec.get("model") or {}
    vocab = model.get("vocab") or {}
    tokens = {token for token, _ in vocab} if isinstance(vocab, list) else set(vocab)
    by_bytes = bool(model.get("byte_fallback")) and tokens.issuperset(BYTES)
    if model.get("type") == "BPE":
        parts = [*_parts(spec.get("normalizer")), *_parts(spec.get("pre_tokenizer"))]
        by_level = any(part.get("type") == "ByteLevel" for part in parts) and tokens.issuperset(
            ByteLevel.alphabet()
        )
        by_unknown = model.get("unk_token") is not None and not model.get("fuse_unk")
        known = by_bytes or by_level or by_unknown
    else:
        known = model.get("type") == "Unigram" and by_bytes
    return max(map(len, tokens)) if known else None


def _shrink(normalizer: Mapping[str, Any] | None) -> int | None:
    """The most characters that become one. None: any number."""
    factor = 1
    for part in _parts(normalizer):
        one = _replaced(part) if part.get("type") == "Replace" else FACTORS.get(str(part.get("type")))
        if one is None:
            return None
        factor *= one
    return factor


def _replaced(part: Mapping[str, Any]) -> int | None:
    found, content = (part.get("pattern") or {}).get("String"), part.get("content")
    return -(-len(found) // len(content)) if found and content else None


def _keeps(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    return all(
        part.get("type") in KEEP_ALL
        or (part.get("type") in KEEP_UNLESS_REMOVED and part.get("behavior") != "Removed")
        for part in _parts(pre_tokenizer)
    )


def _parts(found: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Parts of a normalizer or pre-tokenizer, in order."""
    if not found:
        return []
    if found.get("type") != "Sequence":
        return [found]
    inner = found.get("normalizers") or found.get("pretokenizers") or []
    return [part for one in inner for part in _parts(one)]
