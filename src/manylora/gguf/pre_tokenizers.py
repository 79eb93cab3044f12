"""How text is cut before merges, by `tokenizer.ggml.pre`: the regular expressions of the models' own
tokenizer.json, as llama.cpp groups them.
"""

from __future__ import annotations

from typing import Any

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
ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)
KIMI = (
    WORDS.replace("\\p{M}]", "\\p{M}&&[^\\p{Han}]]") % (f"{TAILS}?", f"{TAILS}?")
    + rf"{TRIPLES}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{LINES}"
)
NO_MARKS = " ?[^(\\s|.,!?…。，、।۔،)]+"
SPACES = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE_MOE = (
    rf"{TAILS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
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
    **_all(
        "jais-2",
        rf"{TAILS}|{LETTERS}|{TRIPLES}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{SPACES}|\s{{1,2}}(?!\S)|\s",
    ),
    **_all("poro-chat bloom gpt3-finnish", NO_MARKS),
    **_all("viking", NO_MARKS, r"\p{N}"),
    **_all("bailingmoe bailingmoe2 llada-moe", BAILING),
    **_all("seed-coder", rf"{TAILS}|{LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}"),
    **_all("ufakzeka", rf"{LETTERS}|\p{{N}}|{REST}"),
    **_all("laguna", r"[^\n]+|[\n]+", QWEN2),
    **_all("exaone-moe", EXAONE_MOE),
    **_all("minicpm5", TRIPLES, rf"{TAILS}|{LETTERS}|\p{{N}}+|{REST}"),
    **_all("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **_all("afmoe", r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", ASIAN, DEEPSEEK3[2]),
    **_all("chameleon", *CHAMELEON),
    **_all("default", *UNNAMED),
}
"""Each is applied to the pieces that the ones before it left, and what it does not match is a piece, too."""
BEGINS = (
    "llama-bpe", "llama3", "llama-v3", "llama4-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken", "chameleon",
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
    """pre: a key of PATTERNS."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PATTERNS[pre]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*steps, level]}
