"""Guided decoding: what a request's output must match, as a matcher over token ids, by llguidance."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError, RequestError
from manylora.request import Guide

__all__ = ["Guides"]


class Guides:
    """Compiles guides for one tokenizer. Raises ConfigError when there is none to read.

    eos_ids: tokens that end the output where the grammar allows its end.
    """

    def __init__(self, tokenizer_dir: Path, vocab_size: int, eos_ids: Iterable[int]) -> None:
        try:
            import llguidance
            from llguidance.gbnf_to_lark import gbnf_to_lark
        except ImportError as error:
            raise ConfigError("guided decoding needs llguidance: pip install llguidance") from error
        path = tokenizer_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"guided decoding: tokenizer_dir: {path} does not exist")
        self._library, self._to_lark = llguidance, gbnf_to_lark
        self._tokenizer = llguidance.LLTokenizer(
            path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_ids) or None
        )

    def compile(self, guide: Guide) -> Any:
        """A matcher at the start of the output; `deep_copy` makes more. Any thread. Raises RequestError."""
        try:
            matcher = self._library.LLMatcher(self._tokenizer, self._grammar(guide), log_level=0)
            failure = matcher.get_error() if matcher.is_error() else ""
        except Exception as error:  # the readers of grammars have no class of their own
            failure = str(error) or type(error).__name__
        if failure:
            reason = " ".join(failure.split())[:300]
            raise RequestError(f"guided_decoding_guide is not a valid {guide.type}: {reason}")
        return matcher

    def _grammar(self, guide: Guide) -> str:
        make = self._library.LLMatcher
        if guide.type == "json":
            return make.grammar_from_json_schema("{}")
        if guide.type == "json_schema":
            return make.grammar_from_json_schema(guide.text)
        if guide.type == "regex":
            return make.grammar_from_regex(guide.text)
        if guide.type == "llguidance":
            return guide.text
        lark = guide.text if guide.type == "lark_grammar" else self._to_lark(guide.text)
        return make.grammar_from_lark(lark)
