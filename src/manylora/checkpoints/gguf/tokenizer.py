"""Builds tokenizer.json and tokenizer_config.json from a GGUF file."""

from __future__ import annotations

import logging
from base64 import b64encode
from typing import Any

import numpy as np

from manylora.checkpoints.gguf.container import Header
from manylora.errors import ConfigError, printable

TAILS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES}"
SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{TAILS}|{LETTERS}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{TAILS}|{LETTERS}|\p{{N}}|{REST}"
QWEN35 = (
    rf"{TAILS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}"
)
TEKKEN = WORDS % ("", "") + r"\p{N}|" + SLASHES
GPT4O = WORDS % (f"{TAILS}?", f"{TAILS}?") + r"\p{N}{1,3}|" + SLASHES
TRIPLES = r"\p{N}{1,3}"
HAN = "[一-龥぀-ゟ゠-ヿ]+"
ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK3 = (
    TRIPLES,
    HAN,
    rf"{ASCII_MARKS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1f7d}ᾀ-ᾴᾶ-ᾼ\x{1fbe}ῂ-ῄῆ-ῌῐ-\x{1fd3}"
    r"ῖ-\x{1fdb}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212a}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    WORDS % (f"{TAILS}?", f"{TAILS}?") + r"\p{N}|" + SLASHES,
)
KIMI = (
    WORDS.replace("\\p{M}]", "\\p{M}&&[^\\p{Han}]]") % (f"{TAILS}?", f"{TAILS}?")
    + rf"{TRIPLES}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES}"
)
NO_MARKS = " ?[^(\\s|.,!?…。，、।۔،)]+"
UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


def _all(names: str, *patterns: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names.split(), patterns)


PATTERNS: dict[str, tuple[str, ...]] = {
    **_all(
        "llama-bpe llama3 llama-v3 llama4-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", LLAMA3
    ),
    **_all("dbrx smaug-bpe chatglm-bpe glm4 glm5", LLAMA3),
    **_all("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", QWEN2),
    **_all("qwen35", QWEN35),
    **_all("tekken", TEKKEN),
    **_all("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", GPT4O),
    **_all("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    **_all("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *DEEPSEEK3),
    **_all("deepseek-coder", *DEEPSEEK_CODER),
    **_all("deepseek-llm", *DEEPSEEK_LLM),
    **_all("youtu", *YOUTU),
    **_all("kimi-k2", r"\p{Han}+", KIMI),
    **_all("falcon", r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    **_all("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", r"\p{N}", GPT2),
    **_all("gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum", GPT2),
    **_all("jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe modern-bert", GPT2),
    **_all("viking", NO_MARKS, r"\p{N}"),
    **_all("seed-coder", rf"{TAILS}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}"),
    **_all("ufakzeka", rf"{LETTERS}|\p{{N}}|{REST}"),
    **_all("minicpm5", TRIPLES, rf"{TAILS}|{LETTERS}|\p{{N}}+|{REST}"),
    **_all("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **_all("default", *UNNAMED),
}
"""Each is applied to the pieces that the ones before it left, and what it does not match is a piece, too."""
BEGINS = (
    "llama-bpe", "llama3", "llama-v3", "llama4-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken",
)  # fmt: skip
"""Those with a begin token unless the file says otherwise."""
WHOLE_WORDS = (*BEGINS, "glm4", "glm5", "youtu", "minicpm5", "granite-embed-multi-97m")
"""Words in the vocabulary are not merged."""
COMPOSED = ("qwen2", "qwen35")
"""Texts are normalised to NFC."""
SEPARATED = ("jina-v1-en", "jina-v2-code", "roberta-bpe")
"""Two texts have a further token between them, unless the file says otherwise."""
SPACES_MARKED = ("sarvam-moe", "granite-embed-multi-311m")
"""Texts are not cut, and spaces are marked as in SentencePiece's tokens."""


def pre_tokenizer(pre: str) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PATTERNS[pre]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, level]}


logger = logging.getLogger("manylora")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
SPACE = "▁"  # SentencePiece's symbol for a space
CONTINUES = "##"  # begins a word piece that does not begin a word
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
    added = []  # tokens that are matched literally in a text; runs of spaces are left to the merges
    for number, (token, sort) in enumerate(zip(tokens, _types(header, len(tokens)), strict=True)):
        special = sort in (CONTROL, UNKNOWN)
        if token and (special or (sort == USER_DEFINED and not (kind != "gpt2" and SPACE in token))):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": number, "content": token, **flags, "special": special})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
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
    pieces = []  # as in BERT's own vocabulary; llama.cpp's converter marks pieces that begin a word instead
    for token, sort in zip(tokens, _types(header, len(tokens)), strict=True):
        if sort == CONTROL or (len(token) > 1 and token[0] == "[" and token[-1] == "]"):
            pieces.append(token)
        else:
            pieces.append(token[1:] if token.startswith(SPACE) else CONTINUES + token)
    return pieces


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


def _ends(header: Header, tokens: list[str], kind: str) -> dict[str, Any]:
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
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": tokens[unknown], "continuing_subword_prefix": CONTINUES,
            "max_input_chars_per_word": 100, "vocab": _numbered(tokens),
        },
    }  # fmt: skip


def _unigram(header: Header, tokens: list[str]) -> dict[str, Any]:
    """As of T5 and XLM-RoBERTa. Tokens that only fill the vocabulary do not change an unknown one's cost."""
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
