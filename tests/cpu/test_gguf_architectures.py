"""Protects GGUF files of each architecture: answers are those of the model's own directory, and of
encoders tokens, hidden states, labels and embeddings, from a file as llama.cpp's converter writes it.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from driver import Driver, agree, decoder_of
from gguf import GGMLQuantizationType as Kind
from gguf_converter import ARCHITECTURES as BY_TYPE
from gguf_converter import convert
from gguf_files import with_tokenizer
from parity import read_from
from pooled_adapters import hidden, logits, make_classifier, near
from running import pooled, read, tokens
from safetensors.torch import load_file, save_file
from selection import extended
from test_encoders import ask, engine_of, make_encoder, prompt
from test_sentence_models import IDENTITY, add_dense, save_modules
from tiny_configs import FAMILIES, MOE_FAMILIES
from tiny_models import make_adapter, make_model, reference_logits

from manylora.checkpoints.gguf.config import ARCHITECTURES
from manylora.checkpoints.gguf.container import read_header
from manylora.config.engine import EngineConfig
from manylora.config.model_folder import local_model
from manylora.config.pooling import read_pooling_settings
from manylora.doors.python import LLM
from manylora.engine.requests import RequestChecks
from manylora.errors import ConfigError, RequestError
from manylora.generation.tokenizer import Tokenizer
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, Request

pytestmark = pytest.mark.usefixtures("one_thread")

# What a file does not say: llama.cpp has these values, as the released models.
LLAMA4 = {
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "attention_chunk_size": 8192,
    "no_rope_layers": [1, 1, 1, 0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"swiglu_limit": 7.0},
    "gpt-oss-plain": {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "layer_types": None},
    "deepseek-v2": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek-v3": {"rope_scaling": {**YARN, "mscale": 1.3, "mscale_all_dim": 1.3}},
    "glm4-moe-lite": {"first_k_dense_replace": 1},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "olmoe": {"clip_qkv": None},
    "llama4": {**LLAMA4, "num_hidden_layers": 4},
    "llama4-interleaved": {**LLAMA4, "use_qk_norm": True},
    "phi": {"num_key_value_heads": 4},
    "glm": {"head_dim": 16},
    "nemotron": {"head_dim": None},
    **{f"nemotron-h{end}": {"time_step_min": 0.001} for end in ("", "-moe", "-moe-latent")},
    "starcoder2": {"sliding_window": None},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window_pattern": 4, "num_hidden_layers": 4},
    "gemma3n": {"altup_num_inputs": 4},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24},
}
USUAL = (
    "llama3",
    "gemma2",
    "phi3-partial-rotary",
    "qwen3-moe",
    "gpt-oss",
    "deepseek-v3",
    "granite4-moe",
    "qwen3.5-moe",
    "gemma4-shared",
    "falcon-new",
)
# What a file cannot say, or another variant has shown.
LEFT_OUT = {
    "deepseek-v3-plain", "falcon-h1-normed", "falcon-sequential", "gemma3n-plain", "gemma4-unified",
    "gemma4-values", "granite4-attention", "granite4-rope", "llama-dynamic", "ministral", "mistral",
    "mistral-sliding", "mixtral-sliding", "nemotron-h-biases", "opt", "opt-350m", "phi3-longrope",
    "qwen2-moe-sparse", "qwen2-sliding", "qwen3-moe-dense-first", "qwen3-next-dense", "smollm3-sliding",
}  # fmt: skip
VARIANTS = {**FAMILIES, **MOE_FAMILIES}
OTHERS = [name for name in VARIANTS if name not in LEFT_OUT and name not in USUAL]
ENCODERS = {"bert", "nomic-bert", "modern-bert", "gemma-embedding"}  # of other tests


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    convert(folder / "tiny.gguf", make_model(folder / "model", "qwen3.5"))
    return folder / "tiny.gguf"


def check_answers(file: Path, model: Path) -> None:
    folder = local_model(file)
    decoder = decoder_of(folder, max_seq_len=64)
    sequences = tokens(60), tokens(1, 3)
    found = Driver(decoder, list(sequences), [None, None]).run()
    for ids, one in zip(sequences, found, strict=True):
        assert agree(one, reference_logits(model, None, ids))


@pytest.mark.parametrize("family", [*USUAL, *extended(*OTHERS)])
def test_answers_as_its_directory(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family, **SETTINGS.get(family, {}))
    convert(tmp_path / "tiny.gguf", model)
    check_answers(tmp_path / "tiny.gguf", model)


def rounded(model: Path, kind: Kind) -> None:
    """Replace each matrix by values that the type has."""
    file, tensors = model / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        flipped = (tensor.ndim == 3 and name.endswith("_proj")) or re.search(r"\.c_\w+\.weight", name)
        stored = (tensor.mT if flipped else tensor).contiguous()
        if stored.ndim > 1 and stored.shape[-1] % 32 == 0:
            blocks = gguf.quantize(stored.numpy(), kind)
            stored = torch.from_numpy(gguf.dequantize(blocks, kind)).view(stored.shape)
        tensors[name] = (stored.mT if flipped else stored).contiguous()
    save_file(tensors, file, {"format": "pt"})


QUANTISED = (
    ("qwen3-moe", Kind.Q8_0, "", {"moe_intermediate_size": 64}),
    ("gpt-oss", Kind.MXFP4, "", {"intermediate_size": 64}),
    ("granite4", Kind.Q8_0, "", {}),
    ("granite4", Kind.Q8_0, "ffn_up", {"shared_intermediate_size": 64}),
    ("qwen3.5", Kind.Q8_0, "", {"linear_value_head_dim": 32}),
    *extended(
        ("qwen3-next", Kind.Q8_0, "", {}),
        ("gpt2", Kind.Q8_0, "", {}),
        ("deepseek-v3", Kind.Q8_0, "", {"moe_intermediate_size": 64}),
        ("gpt-neox", Kind.Q8_0, "", {}),
    ),
)


@pytest.mark.parametrize("case", QUANTISED, ids=lambda case: f"{case[0]} {case[1].name} {case[2]}")
def test_quantised_experts_and_joined_matrices_answer_as_their_wide_values(
    case: tuple[str, Kind, str, dict[str, Any]], tmp_path: Path
) -> None:
    family, kind, plain, settings = case
    model = make_model(tmp_path / "model", family, **SETTINGS.get(family, {}), **settings)
    rounded(model, kind)
    convert(tmp_path / "tiny.gguf", model, kind, plain)
    kinds = {info.kind for info in read_header(tmp_path / "tiny.gguf").tensors.values()}
    assert kind.name in kinds
    check_answers(tmp_path / "tiny.gguf", model)


@pytest.mark.parametrize("family", ["granite4", *extended("nemotron-h", "qwen3-next", "falcon-new")])
def test_an_adapter_on_joined_and_reordered_matrices(family: str, tmp_path: Path) -> None:
    """With DoRA, which reads the base's matrices. Without rotary positions only an adapter tells the order of
    q and k.
    """
    model = make_model(tmp_path / "model", family, **SETTINGS.get(family, {}))
    convert(tmp_path / "tiny.gguf", model)
    modules = {
        "granite4": ("in_proj", "input_linear", "q_proj", "k_proj"),
        "nemotron-h": ("in_proj", "up_proj", "q_proj", "k_proj"),
        "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"),
        "falcon-new": ("query_key_value", "dense_h_to_4h"),
    }[family]
    adapter = make_adapter(tmp_path / "adapter", model, modules=modules, use_dora=True)
    folder = local_model(tmp_path / "tiny.gguf")
    decoder = decoder_of(folder, max_seq_len=64)
    found = Driver(decoder, [tokens(30)], [read_from(adapter, folder)]).run()
    assert agree(found[0], reference_logits(model, adapter, tokens(30)))


@pytest.mark.parametrize("key", [
    "block_count", "embedding_length", "attention.head_count", "attention.key_length", "ssm.time_step_rank",
    "ssm.group_count", "ssm.state_size", "ssm.inner_size", "attention.head_count_kv",
])  # fmt: skip
def test_sizes_of_another_model_are_refused(key: str, qwen: Path, tmp_path: Path) -> None:
    """By a clear error, before anything as large is made."""
    data, name = qwen.read_bytes(), f"qwen35.{key}".encode()
    at = data.index(name) + len(name) + 4  # after the value's type
    for value in (0, 2**31 - 1):
        file = tmp_path / f"{value}.gguf"
        file.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
        with pytest.raises(ConfigError) as raised:
            folder = local_model(file)
            decoder_of(folder, max_seq_len=64)
        assert "\n" not in str(raised.value)


def test_a_file_without_its_multipliers_takes_no_adapters(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "falcon-h1", num_hidden_layers=1)
    convert(tmp_path / "tiny.gguf", model)
    folder, request = local_model(tmp_path / "tiny.gguf"), Request((1,), lora=LoraInput(1))
    with pytest.raises(RequestError, match=r"GGUF file of Falcon-H1: .* serve the original model"):
        RequestChecks(EngineConfig(folder), read_model_config(folder), 64).check(request)
    RequestChecks(EngineConfig(model), read_model_config(model), 64).check(request)


def test_each_architecture_is_tested() -> None:
    tested = {BY_TYPE.get(VARIANTS[name][0], VARIANTS[name][0]) for name in (*USUAL, *OTHERS)} | ENCODERS
    assert {name.partition(" ")[0] for name in ARCHITECTURES} == {*tested, "nemotron_h"}  # as with experts


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
