"""Protects GGUF files of encoders: tokens, hidden states, labels and embeddings are those of the model's own
directory, from a file as llama.cpp's converter writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_converter import convert
from gguf_files import with_tokenizer
from pooled_adapters import hidden, logits, make_classifier, near
from running import pooled, read
from test_encoders import ask, engine_of, make_encoder, prompt
from test_sentence_models import IDENTITY, add_dense, save_modules
from tiny_models import make_model

from manylora.config.model_folder import local_model
from manylora.config.pooling import read_pooling_settings
from manylora.doors.python import LLM
from manylora.errors import ConfigError, RequestError
from manylora.generation.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = (
    "Hello, hello wörld! It's 12345 o'clock; we'LL see.", "  two  spaces\n\n\tand a tab ", "naïve CAFÉ – ÀÉ",
    "", " ", "東京 🙂 हिन्दी", "[MASK] a</s>b<s> c <mask> [x]", "un##happy ▁x", "x" * 120,
    "ﬁne ｆｕｌｌ\u200bx",
)  # fmt: skip
SPECIAL = {
    "words": {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "pieces": {"bos": "<s>", "cls": "<s>", "pad": "<pad>", "eos": "</s>", "sep": "</s>", "unk": "<unk>",
               "mask": "<mask>"},
}  # fmt: skip


def characters() -> bytes:
    """SentencePiece's table of characters: a trie of the bytes of "ﬁ", which is replaced by "fi"."""
    units, at = [0] * 0x401, 0x100
    units[0] = at << 10
    for byte, then in zip("ﬁ".encode(), (0x200, 0x300, 0x400), strict=True):
        at ^= byte
        units[at] = (at ^ then) << 10 | (then == 0x400) << 8 | byte
        at = then
    return np.array([len(units) * 4, *units], "<u4").tobytes() + b"fi\0"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def train(folder: Path, kind: str, size: int = 240) -> Path:
    """BERT's tokenizer, or XLM-RoBERTa's."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    named = SPECIAL[kind]
    special = list(dict.fromkeys(named.values()))
    if kind == "words":
        library = Library(models.WordPiece(unk_token="[UNK]"))
        library.normalizer = normalizers.BertNormalizer(lowercase=True)
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        library.decoder = decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    else:
        library = Library(models.Unigram())
        library.normalizer = normalizers.Precompiled(characters())
        library.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()
        ])  # fmt: skip
        library.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    library.train_from_iterator([text * 3 for text in (*TEXTS[:3], TEXTS[5])], trainer)
    ids = [(token, library.token_to_id(token)) for token in special]
    first, last = named["cls"], named["sep"]
    pair = f"{first} $A {last} $B:1 {last}:1" if kind == "words" else f"{first} $A {last} {last} $B {last}"
    library.post_processor = processors.TemplateProcessing(f"{first} $A {last}", pair, ids)
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    settings = {f"{name}_token": token for name, token in named.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_text_is_cut_as_by_the_model_s_own_tokenizer(kind: str, tmp_path: Path) -> None:
    own = train(tmp_path / "own", kind)
    ours, wanted = Tokenizer(with_tokenizer(tmp_path / "a.gguf", own)), Tokenizer(own)
    for text in TEXTS:
        ids = wanted.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode_pair(text, "and that") == wanted.encode_pair(text, "and that")
        assert ours.decode(ids) == wanted.decode(ids)


def make_whole(path: Path, kind: str, auto: str = "AutoModel", **settings: Any) -> Path:
    """With a tokenizer."""
    if kind in ("modernbert", "gemma3_text"):
        make_model(path, "llama")
        settings["vocab_size"] = Tokenizer(path).vocab_size
    else:
        train(path, "pieces" if kind == "xlm-roberta" else "words")
    return make_encoder(path, kind, auto, **settings)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "nomic_bert", "modernbert", "gemma3_text"])
def test_hidden_states(kind: str, tmp_path: Path) -> None:
    own = {"query_pre_attn_scalar": 24} if kind == "gemma3_text" else {}  # of released models: not in a file
    model = make_whole(tmp_path / "model", kind, **own)
    convert(tmp_path / "tiny.gguf", model)
    engine, prompts = engine_of(local_model(tmp_path / "tiny.gguf")), [prompt(90, 1), prompt(3, 2)]
    for ids, found in zip(prompts, pooled(engine, *(ask(ids, "all") for ids in prompts)), strict=True):
        assert near(found, hidden(model, ids))


@pytest.mark.parametrize("kind", ["xlm-roberta", "modernbert"])
def test_labels_and_an_adapter(kind: str, tmp_path: Path) -> None:
    import transformers

    auto, names = "AutoModelForSequenceClassification", {0: "bad", 1: "fair", 2: "good"}
    model = make_whole(tmp_path / "model", kind, auto, id2label=names, classifier_pooling="mean")
    convert(tmp_path / "tiny.gguf", model)
    folder = local_model(tmp_path / "tiny.gguf")
    settings, ids = read_pooling_settings(folder), prompt(20, 1)
    assert settings.labels == tuple(names.values())
    linears = ["query", "output.dense"] if kind == "xlm-roberta" else ["Wqkv", "Wi"]
    adapted = make_classifier(tmp_path / "own", model, 3, 1, target_modules=linears)
    lora = read(tmp_path / "own", folder, 1)
    plain, own = pooled(engine_of(folder), *(ask(ids, settings.head_mode, True, one) for one in (None, lora)))
    base = getattr(transformers, auto).from_pretrained(model, dtype=torch.float32).eval()
    assert near(plain, logits(base, ids)) and near(own, logits(adapted, ids))


def test_embeddings(tmp_path: Path) -> None:
    """As of EmbeddingGemma: the mean, and two dense layers."""
    model = make_whole(tmp_path / "model", "gemma3_text", query_pre_attn_scalar=24)
    save_modules(model, ["Pooling", "Dense", "Dense", "Normalize"], "mean_tokens")
    add_dense(model / "2_Dense", 64, 96, IDENTITY, False)
    add_dense(model / "3_Dense", 96, 48, IDENTITY, False)
    convert(tmp_path / "tiny.gguf", model)
    found = []
    for name in (model, tmp_path / "tiny.gguf"):
        with LLM(name, device="cpu", dtype="float32") as llm:
            found.append(np.array([one.outputs.embedding for one in llm.embed(list(TEXTS[:3]))]))
    assert found[0].shape == (3, 48) and near(found[1], found[0])


@pytest.mark.parametrize(("mode", "kind"), [("mean", 1), ("cls", 2), ("last", 3), ("last", 4)])
def test_the_file_says_how_to_pool(mode: str, kind: int, tmp_path: Path) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("llama.pooling_type", kind)

    settings = read_pooling_settings(with_tokenizer(tmp_path / "a.gguf", tmp_path, write))
    assert (settings.mode, settings.normalise) == (mode, True)


@pytest.mark.parametrize(("change", "value", "words"), [
    ("characters", b"\xff\xff", "not a tokenizer"), ("characters", b"\xff\0\0\0\0", "not a tokenizer"),
    ("characters", b"\x04\0\0\0aaaa", "tokenizer cannot read this text"),
    ("scores", [0.0], "scores has 1 entries for 2 tokens"), ("model", "bert", "lacks an unknown token"),
    ("pooling", 7, "pooling_type 7 is not one of"),
])  # fmt: skip
def test_bad_files_are_refused_by_name(change: str, value: Any, words: str, tmp_path: Path) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        keys: dict[str, Any] = {"model": "t5", "scores": [0.0, -1.0], "pooling": 1, change: value}
        writer.add_tokenizer_model(keys["model"])
        writer.add_token_list(["<unk>", "a"])
        writer.add_token_scores(keys["scores"])
        writer.add_unk_token_id(9 if change == "model" else 0)
        if "characters" in keys:
            writer.add_precompiled_charsmap(value)
        writer.add_uint32("llama.pooling_type", keys["pooling"])

    with pytest.raises((ConfigError, RequestError), match=words):
        Tokenizer(with_tokenizer(tmp_path / "a.gguf", tmp_path, write)).encode("a b")
