"""Protects streamed text: no delta shows half a character, and all that is certain is shown at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from manylora.errors import ConfigError, RequestError
from manylora.generation.tokenizer import Tokenizer

TEXTS = [
    "The capital of France is Paris.",
    "美国的首都在哪里? 华盛顿。アメリカ合衆国の首都はワシントンD.C.です。",
    "ሰላም ለዓለም  مرحبا بالعالم  नमस्ते दुनिया  สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🇯🇵 🏴󠁧󠁢󠁳󠁣󠁴󠁿 e\u0301 \u200b end",
    "  two  spaces\n\nand\ttabs ",
]


def byte_level() -> Library:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Library:
    tokens = [f"<0x{b:02X}>" for b in range(256)] + ["▁"] + list("abcdefghijklmnopqrstuvwxyzTPF.")
    made = Library(
        models.BPE(
            {"<unk>": 0} | {t: i + 1 for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def word_piece() -> Library:
    words = [
        "[UNK]",
        ".",
        ",",
        "'",
        "the",
        "capital",
        "##s",
        "is",
        "do",
        "n't",
        "##x",
        "a",
        "华",
        "盛",
        "##顿",
    ]
    made = Library(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


@pytest.fixture(params=[byte_level, byte_fallback, word_piece], ids=lambda f: f.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    made = request.param()
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "eos_token": {"content": "</s>"},
        "bos_token": "<s>",
        "chat_template": "{{ messages[0].content }}!",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(tmp_path)


def test_a_growing_output_is_shown_at_once(tokenizer: Tokenizer) -> None:
    """Nothing but half a character, or a run of bytes, is held back."""
    made = tokenizer.stream()
    shown = "".join(made.add([i], False) for i in tokenizer.encode("the capital is a"))
    assert shown.strip() == tokenizer.decode(tokenizer.encode("the capital is a")).strip()


def test_ids_and_the_chat_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.decode([tokenizer.eos_id or 0]) == ""
    assert tokenizer.pad_id == tokenizer.eos_id
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "hi!"
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(tmp_path).chat([])
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer(tmp_path / "nowhere")
