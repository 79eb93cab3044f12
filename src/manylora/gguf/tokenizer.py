"""Builds tokenizer.json and tokenizer_config.json from a GGUF file."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from manylora.errors import ConfigError, printable
from manylora.gguf.container import Header
from manylora.gguf.pre_tokenizers import BEGINS, COMPOSED, PATTERNS, WHOLE_WORDS, pre_tokenizer

logger = logging.getLogger("manylora")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "▁"  # SentencePiece's symbol for a space
LONGEST_PIECE = 512  # characters; longer tokens do not occur in text
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_json(header: Header) -> dict[str, Any]:
    """Raises ConfigError that names a kind of tokenizer that is not supported."""
    kind, tokens = header.metadata.get("tokenizer.ggml.model"), _tokens(header)
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocab.setdefault(token, number)
    if kind == "gpt2":
        parts = _byte_level(header, vocab)
    elif kind in ("llama", "gemma4"):
        parts = _sentence_pieces(header, vocab)
    else:
        raise ConfigError(
            f"{header.path}: tokenizer {printable(str(kind))} is not read; read are gpt2, llama and gemma4: "
            "name the folder of another (--tokenizer, tokenizer=)"
        )
    begins = kind != "gpt2" or header.metadata.get("tokenizer.ggml.pre") in BEGINS
    model = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(header, tokens, kind),
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _ends(header, tokens, begins),
        "decoder": parts["decoder"],
        "model": {**model, **parts["model"], "vocab": vocab, "merges": parts["merges"]},
    }


def tokenizer_config(header: Header) -> dict[str, Any]:
    metadata, tokens = header.metadata, _tokens(header)
    named = {ours: _special_id(header, theirs, tokens) for ours, theirs in SPECIAL.items()}
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[number] for name, number in named.items() if number is not None},
        **({"chat_template": template} if isinstance(template, str) else {}),
    }


def has_tokenizer(header: Header) -> bool:
    return header.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def _tokens(header: Header) -> list[str]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"{header.path}: metadata tokenizer.ggml.tokens must be a list of texts")
    return tokens


def _types(header: Header, count: int) -> list[int]:
    found = header.metadata.get("tokenizer.ggml.token_type")
    types: list[int] = found.tolist() if isinstance(found, np.ndarray) else [NORMAL] * count
    if len(types) != count:
        raise ConfigError(
            f"{header.path}: tokenizer.ggml.token_type has {len(types)} entries for {count} tokens"
        )
    return types


def _special_id(header: Header, name: str, tokens: list[str]) -> int | None:
    number = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return number if isinstance(number, int) and 0 <= number < len(tokens) else None


def _added(header: Header, tokens: list[str], kind: str) -> list[dict[str, Any]]:
    """Tokens that are matched literally in a text. Runs of spaces are left to the merges."""
    added = []
    for number, (token, sort) in enumerate(zip(tokens, _types(header, len(tokens)), strict=True)):
        special = sort in (CONTROL, UNKNOWN)
        if token and (special or (sort == USER_DEFINED and not (kind != "gpt2" and SPACE in token))):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": number, "content": token, **flags, "special": special})
    return added


def _ends(header: Header, tokens: list[str], adds_begin: bool) -> dict[str, Any]:
    """The tokens around a text."""
    adds = {
        "bos": header.metadata.get("tokenizer.ggml.add_bos_token", adds_begin),
        "eos": header.metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: _special_id(header, name, tokens) for name, wanted in adds.items() if wanted}
    special = {
        tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in ids.values() if i is not None
    }

    def around(letter: str, number: int) -> list[dict[str, Any]]:
        parts = [{"Sequence": {"id": letter, "type_id": number}}]
        marks = {
            name: [{"SpecialToken": {"id": tokens[i], "type_id": number}}]
            for name, i in ids.items()
            if i is not None
        }
        return [*marks.get("bos", []), *parts, *marks.get("eos", [])]

    single, pair = around("A", 0), around("A", 0) + around("B", 1)
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _byte_level(header: Header, vocab: dict[str, int]) -> dict[str, Any]:
    pre = header.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PATTERNS:
        raise ConfigError(
            f"{header.path}: tokenizer.ggml.pre {printable(str(pre))} is not read; read are "
            f"{', '.join(PATTERNS)}: name the folder of another tokenizer (--tokenizer, tokenizer=)"
        )
    if pre == "default":
        logger.warning(
            "%s does not say how its tokenizer cuts text (tokenizer.ggml.pre): as llama.cpp does then, which "
            "suits few models",
            header.path,
        )
    return {
        "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
        "pre_tokenizer": pre_tokenizer(pre),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre in WHOLE_WORDS,
        },
        "merges": _given_merges(header, vocab),
    }  # fmt: skip


def _given_merges(header: Header, vocab: dict[str, int]) -> list[tuple[str, ...]]:
    merges = [tuple(text.split(" ")) for text in header.metadata.get("tokenizer.ggml.merges") or []]
    for merge in merges:
        if len(merge) != 2 or any(part not in vocab for part in (*merge, "".join(merge))):
            raise ConfigError(f"{header.path}: the merge {printable(' '.join(merge))} is not of its tokens")
    return merges


def _sentence_pieces(header: Header, vocab: dict[str, int]) -> dict[str, Any]:
    tokens = _tokens(header)
    prefixed = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps = [{"type": "Prepend", "prepend": SPACE}, spaces] if prefixed else [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _special_id(header, "unknown", tokens)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "unk_token": None if unknown is None else tokens[unknown], "fuse_unk": True,
            "byte_fallback": True, "ignore_merges": False,
        },
        "merges": (
            _given_merges(header, vocab)
            if header.metadata["tokenizer.ggml.model"] == "gemma4"
            else _scored_merges(header, tokens, vocab)
        ),
    }  # fmt: skip


def _scored_merges(header: Header, tokens: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose token has the highest score: all ways to build a token from two."""
    scores = header.metadata.get("tokenizer.ggml.scores")
    values: list[float] = scores.tolist() if isinstance(scores, np.ndarray) else []
    if len(values) != len(tokens):
        raise ConfigError(
            f"{header.path}: tokenizer.ggml.scores has {len(values)} entries for {len(tokens)} tokens"
        )
    found: list[tuple[float, str, str]] = []
    for token, score, sort in zip(tokens, values, _types(header, len(tokens)), strict=True):
        if sort in (CONTROL, UNKNOWN, BYTE) or len(token) > LONGEST_PIECE:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, *pair) for pair in pairs]
    found.sort(key=lambda one: (one[0], len(one[1]), len(one[2])), reverse=True)
    return [(left, right) for _, left, right in found]
