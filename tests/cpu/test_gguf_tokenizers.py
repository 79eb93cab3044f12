"""Protects tokenizers in GGUF files: text is cut and merged as by the model's own tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import tokenizers
from gguf_files import with_tokenizer

from manylora.checkpoints.gguf.tokenizer import PATTERNS
from manylora.errors import ConfigError
from manylora.generation.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


TEXTS = (
    "Hello, world! It's 12345 o'clock; we'LL see.", "  two  spaces\n\n\tand a tab ",
    "naïve café – ÀÉ 東京 🙂🙂",
    "", " ", "a</s>b<s> c", "def f(x):\n    return x**2  # ok\r\n",
)  # fmt: skip


def train(path: Path, pre: str) -> Path:
    """A byte-level tokenizer with merges, cut as the models cut that have this `pre`."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Library

    library, level = Library(models.BPE()), pre_tokenizers.ByteLevel
    if pre == "qwen2":
        library.normalizer = normalizers.NFC()
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), level(False, use_regex=False)]
    else:
        parts = [level(add_prefix_space=False)]
    library.pre_tokenizer = pre_tokenizers.Sequence(parts)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=level.alphabet(), show_progress=False)
    library.train_from_iterator([text * 3 for text in TEXTS], trainer)
    library.add_special_tokens(["<s>", "</s>", "<pad>"])
    path.mkdir()
    library.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": "{{ messages }}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
def test_byte_level_text_is_cut_as_by_the_model_s_own_tokenizer(pre: str, tmp_path: Path) -> None:
    own = train(tmp_path / "own", pre)
    ours = Tokenizer(with_tokenizer(tmp_path / "a.gguf", own, pre=pre))
    wanted = Tokenizer(own)
    for text in TEXTS:
        ids = wanted.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == wanted.decode(ids)
    assert (ours.eos_id, ours.pad_id) == (wanted.eos_id, wanted.pad_id)
    assert ours.chat([{"role": "user"}]) == wanted.chat([{"role": "user"}])


def test_sentence_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    """Ids as of Llama 2: a space in front, the best pair first, bytes for what is unknown."""
    pieces = ["▁", "h", "e", "l", "o", "w", "he", "ll", "▁he", "llo", "▁hello", "▁w"]

    def write(writer: gguf.GGUFWriter) -> None:
        kinds = gguf.TokenType
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        types = [
            kinds.UNKNOWN,
            kinds.CONTROL,
            kinds.CONTROL,
            *[kinds.BYTE] * 256,
            *[kinds.NORMAL] * len(pieces),
        ]
        scores = [0.0] * 259 + [-100.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    ours = Tokenizer(with_tokenizer(tmp_path / "a.gguf", tmp_path, write))

    def numbers(*found: str) -> list[int]:
        return [259 + pieces.index(one) for one in found]

    assert ours.encode("hello who") == [1, *numbers("▁hello", "▁w", "h", "o")]
    assert ours.encode("é</s>") == [1, *numbers("▁"), 3 + 0xC3, 3 + 0xA9, 2]
    for text in ("hello who", "é", "🙂 low"):
        assert ours.decode(ours.encode(text)) == text


PIECES = (
    ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
    ("exaone4", "it'S", ["it", "'", "S"]),
    ("llama-bpe", "it'S 1234", ["it", "'S", " ", "123", "4"]),
    ("glm4", "12345", ["123", "45"]),
    ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
    ("qwen2", "\u0915\u093f", ["\u0915", "\u093f"]),
    ("qwen35", "\u0915\u093f", ["\u0915\u093f"]),
    ("smollm", "a 12", ["a", " ", "1", "2"]),
    ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    ("llama4", "HelloWORLD's 1234", ["Hello", "WORLD's", " ", "123", "4"]),
    ("deepseek-v3", "x=1234 東京abc", ["x", "=", "123", "4", " ", "東京", "abc"]),
    ("deepseek-coder", "12 ab\n", ["1", "2", " ab", "\n"]),
    ("deepseek-llm", "12 ab東京", ["12", " ab", "東京"]),
    ("falcon", "a, 1234", ["a", ",", " ", "123", "4"]),
    ("viking", "a12", ["a", "1", "2"]),
    ("kimi-k2", "東京abc 1234", ["東京", "abc", " ", "123", "4"]),
    ("minicpm5", "12345", ["123", "45"]),
    ("tiny_aya", "1234567", ["1", "234", "567"]),
    ("superbpe", "a 1234567 b", ["a ", "1", "234", "567", " b"]),
    ("granite-embed-multi-97m", "HelloWORLD's", ["Hello", "WORLD's"]),
    ("default", "a, 1234", ["a", ",", " ", "123", "4"]),
)


def test_each_pre_tokenizer_cuts_text_and_loses_nothing(tmp_path: Path) -> None:
    own = train(tmp_path / "own", "gpt-2")
    made = {
        pre: with_tokenizer(tmp_path / f"{number}.gguf", own, pre=pre) for number, pre in enumerate(PATTERNS)
    }
    for pre, text, wanted in PIECES:
        library = tokenizers.Tokenizer.from_file(str(made[pre] / "tokenizer.json"))
        found = [text[start:stop] for _, (start, stop) in library.pre_tokenizer.pre_tokenize_str(text)]
        assert found == wanted, pre
    for pre, folder in made.items():
        tokenizer = Tokenizer(folder)
        for text in TEXTS[:3]:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text, pre


def test_the_client_reads_a_file_as_a_folder(tmp_path: Path) -> None:
    """It prints the ids before it connects, and there is no server."""
    own = train(tmp_path / "own", "gpt-2")
    with_tokenizer(tmp_path / "a.gguf", own)
    client = Path(__file__).parents[2] / "client/inflight_batcher_llm_client.py"
    outputs = [
        subprocess.run(
            [sys.executable, client, "-u", "127.0.0.1:1", "--text", TEXTS[0], "--tokenizer-dir", given],
            capture_output=True, text=True, timeout=60, check=False,
        ).stdout
        for given in (own, tmp_path / "a.gguf", tmp_path / "none.gguf")
    ]  # fmt: skip
    known = outputs[0].partition("Encountered error")[0]
    assert f"Input sequence:  {Tokenizer(own).encode(TEXTS[0])}" in known and "end_id:  " in known
    assert outputs[1].partition("Encountered error")[0] == known
    assert "--tokenizer-dir" in outputs[2] and "none.gguf" in outputs[2]


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    own = train(tmp_path / "own", "gpt-2")
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.pre elvish is not read; read are llama-bpe, .*"):
        with_tokenizer(tmp_path / "a.gguf", own, pre="elvish")


@pytest.mark.parametrize(("model", "pre"), [("gemma4", "default"), ("gpt2", "sarvam-moe")])
def test_merges_of_a_tokenizer_with_spaces_as_marks_are_those_of_the_file(
    model: str, pre: str, tmp_path: Path
) -> None:
    """As of Gemma 4: bytes for what is unknown, no space in front."""
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "llo", "hello", "▁hello"]

    def write(writer: gguf.GGUFWriter) -> None:
        kinds = gguf.TokenType
        tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        types = [*[kinds.CONTROL] * 3, kinds.UNKNOWN, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(pieces)]
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_add_bos_token(True)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(["h e", "l l", "ll o", "he llo", "▁ hello"])
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(False)

    ours = Tokenizer(with_tokenizer(tmp_path / "a.gguf", tmp_path, write))
    assert ours.encode("hello hello") == [2, *(260 + pieces.index(one) for one in ("hello", "▁hello"))]
    for text in ("hello  he", "é", "\n\n"):
        assert ours.decode(ours.encode(text)) == text
