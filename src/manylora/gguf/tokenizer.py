"""Builds tokenizer.json and tokenizer_config.json from a GGUF file."""

from __future__ import annotations

import logging
from base64 import b64encode
from typing import Any

import numpy as np

from manylora.errors import ConfigError, printable
from manylora.gguf.container import Header
from manylora.gguf.pre_tokenizers import (
    BEGINS,
    COMPOSED,
    PATTERNS,
    SEPARATED,
    SPACES_MARKED,
    WHOLE_WORDS,
    pre_tokenizer,
)

logger = logging.getLogger("manylora")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "▁"  # SentencePiece's symbol for a space
REST = "##"  # begins a word piece that does not begin a word
LONGEST_PIECE = 512  # characters; longer tokens do not occur in text
SPECIAL = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding",
    "sep_token": "seperator", "mask_token": "mask",
}  # fmt: skip
BERT = {"bos": 101, "eos": 102, "unknown": 100, "padding": 0, "mask": 103}  # where the file does not say
BPE = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}


def tokenizer_json(header: Header) -> dict[str, Any]:
    """Raises ConfigError that names a kind of tokenizer that is not supported."""
    kind, tokens = header.metadata.get("tokenizer.ggml.model"), _tokens(header)
    if kind not in KINDS:
        raise ConfigError(
            f"{header.path}: tokenizer {printable(str(kind))} is not read; read are {', '.join(KINDS)}: "
            "name the folder of another (--tokenizer, tokenizer=)"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(header, tokens, kind),
        "post_processor": _ends(header, tokens, kind),
        **KINDS[kind](header, tokens),
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
    if header.metadata["tokenizer.ggml.model"] != "bert":
        return tokens
    return [_word_piece(*one) for one in zip(tokens, _types(header, len(tokens)), strict=True)]


def _word_piece(token: str, sort: int) -> str:
    """As in BERT's own vocabulary; llama.cpp's converter marks the pieces that begin a word instead."""
    if sort == CONTROL or (len(token) > 1 and token[0] == "[" and token[-1] == "]"):
        return token
    return token[1:] if token.startswith(SPACE) else REST + token


def _types(header: Header, count: int) -> list[int]:
    found = header.metadata.get("tokenizer.ggml.token_type")
    types: list[int] = found.tolist() if isinstance(found, np.ndarray) else [NORMAL] * count
    if len(types) != count:
        raise ConfigError(
            f"{header.path}: tokenizer.ggml.token_type has {len(types)} entries for {count} tokens"
        )
    return types


def _special_id(header: Header, name: str, tokens: list[str]) -> int | None:
    default = BERT.get(name) if header.metadata["tokenizer.ggml.model"] == "bert" else None
    number = header.metadata.get(f"tokenizer.ggml.{name}_token_id", default)
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


def _ends(header: Header, tokens: list[str], kind: str) -> dict[str, Any]:
    """The tokens around a text, and between two."""
    pre = header.metadata.get("tokenizer.ggml.pre")
    names = {"bos": ("bos",), "eos": ("eos",), "sep": ("seperator", "eos")}
    if kind == "bert":
        names = {"bos": ("cls", "bos"), "eos": ("seperator", "eos")}
    found = {name: [_special_id(header, one, tokens) for one in of] for name, of in names.items()}
    ids = {name: next((i for i in of if i is not None), None) for name, of in found.items()}
    adds = {
        "bos": pre in BEGINS if kind == "gpt2" else kind != "t5",
        "eos": kind in ("bert", "t5"),
        "sep": pre in SEPARATED,
    }
    if kind != "bert":  # whose marks are the same whatever the file says
        adds = {name: header.metadata.get(f"tokenizer.ggml.add_{name}_token", adds[name]) for name in adds}
    marks = {
        name: [{"SpecialToken": {"id": tokens[i], "type_id": 0}}]
        for name, i in ids.items()
        if adds[name] and i is not None
    }
    begin, end = marks.get("bos", []), marks.get("eos", [])
    between = marks.get("sep", []) if kind == "t5" or pre in SEPARATED else []
    repeated = [] if adds["sep"] or kind == "bert" else begin
    typed = 0 if between else 1  # RoBERTa has one type
    first, second = ({"Sequence": {"id": letter, "type_id": t}} for letter, t in (("A", 0), ("B", typed)))
    last = [{"SpecialToken": {**one["SpecialToken"], "type_id": typed}} for one in end]
    return {
        "type": "TemplateProcessing",
        "single": [*begin, first, *end],
        "pair": [*begin, first, *end, *between, *repeated, second, *last],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]}
            for i in ids.values()
            if i is not None
        },
    }


def _numbered(tokens: list[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocab.setdefault(token, number)
    return vocab


def _byte_level(header: Header, tokens: list[str]) -> dict[str, Any]:
    pre, vocab = header.metadata.get("tokenizer.ggml.pre", "default"), _numbered(tokens)
    if pre in SPACES_MARKED:
        return _sentence_pieces(header, tokens)
    if pre not in PATTERNS:
        raise ConfigError(
            f"{header.path}: tokenizer.ggml.pre {printable(str(pre))} is not read; read are "
            f"{', '.join((*PATTERNS, *SPACES_MARKED))}: name the folder of another tokenizer (--tokenizer, "
            "tokenizer=)"
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
            **BPE, "unk_token": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": pre in WHOLE_WORDS, "vocab": vocab, "merges": _given_merges(header, vocab),
        },
    }  # fmt: skip


def _word_pieces(header: Header, tokens: list[str]) -> dict[str, Any]:
    lower = header.metadata.get("tokenizer.ggml.normalizer.lowercase", True)
    unknown = _special_id(header, "unknown", tokens)
    if unknown is None:
        raise ConfigError(f"{header.path}: tokenizer bert lacks an unknown token")
    return {
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": lower,
            "strip_accents": header.metadata.get("tokenizer.ggml.normalizer.strip_accents", lower),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": REST, "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": tokens[unknown], "continuing_subword_prefix": REST,
            "max_input_chars_per_word": 100, "vocab": _numbered(tokens),
        },
    }  # fmt: skip


def _unigram(header: Header, tokens: list[str]) -> dict[str, Any]:
    """As of T5 and XLM-RoBERTa. Entries that only fill the vocabulary do not lower what an unknown character
    costs.
    """
    scores, types = _scores(header, tokens), _types(header, len(tokens))
    least = min((one for one, sort in zip(scores, types, strict=True) if sort == NORMAL), default=0.0)
    prefixed = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    marks = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always" if prefixed else "never"}
    table = header.metadata.get("tokenizer.ggml.precompiled_charsmap")
    chars = table.tobytes() if isinstance(table, np.ndarray) else b""
    steps = [{"type": "WhitespaceSplit"}, marks]
    if not header.metadata.get("tokenizer.ggml.remove_extra_whitespaces", True):
        steps = [marks]
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": b64encode(chars).decode()}
        if chars
        else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": marks,
        "model": {
            "type": "Unigram",
            "unk_id": _special_id(header, "unknown", tokens),
            "byte_fallback": BYTE in types,
            "vocab": [[token, max(one, least)] for token, one in zip(tokens, scores, strict=True)],
        },
    }


def _given_merges(header: Header, vocab: dict[str, int]) -> list[tuple[str, ...]]:
    merges = [tuple(text.split(" ")) for text in header.metadata.get("tokenizer.ggml.merges") or []]
    for merge in merges:
        if len(merge) != 2 or any(part not in vocab for part in (*merge, "".join(merge))):
            raise ConfigError(f"{header.path}: the merge {printable(' '.join(merge))} is not of its tokens")
    return merges


def _sentence_pieces(header: Header, tokens: list[str]) -> dict[str, Any]:
    scored, vocab = header.metadata["tokenizer.ggml.model"] == "llama", _numbered(tokens)
    prefixed = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", scored))
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
            **BPE, "unk_token": None if unknown is None else tokens[unknown], "fuse_unk": True,
            "byte_fallback": True, "ignore_merges": False, "vocab": vocab,
            "merges": (_scored_merges(header, tokens, vocab) if scored else _given_merges(header, vocab)),
        },
    }  # fmt: skip


KINDS = {
    "gpt2": _byte_level, "llama": _sentence_pieces, "gemma4": _sentence_pieces, "bert": _word_pieces,
    "t5": _unigram,
}  # fmt: skip
"""By `tokenizer.ggml.model`: the normalizer, pre-tokenizer, decoder and model of tokenizer.json."""


def _scores(header: Header, tokens: list[str]) -> list[float]:
    scores = header.metadata.get("tokenizer.ggml.scores")
    values: list[float] = scores.tolist() if isinstance(scores, np.ndarray) else []
    if len(values) != len(tokens):
        raise ConfigError(
            f"{header.path}: tokenizer.ggml.scores has {len(values)} entries for {len(tokens)} tokens"
        )
    return values


def _scored_merges(header: Header, tokens: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose token has the highest score: all ways to build a token from two."""
    values = _scores(header, tokens)
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
