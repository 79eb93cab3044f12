"""Protects GGUF files as base models: values bit for bit those of gguf-py, answers and text those of the same
model's directory, tokenizers that cut and merge as the model's own, and what a stranger's file may say."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from driver import Driver, agree, decoder_of
from gguf import GGMLQuantizationType as Kind
from gguf_files import make_gguf, with_tokenizer
from parity import read_from
from running import check_greedy, tokens
from selection import extended
from tiny_models import make_adapter, make_model, reference_logits

from manylora import LLM, KvCacheConfig, LoraConfig, LoRARequest, SamplingParams
from manylora.checkpoints.gguf.blocks import PLAIN, read_blocks, widen
from manylora.checkpoints.gguf.container import READ, block_sizes
from manylora.checkpoints.gguf.tokenizer import PATTERNS
from manylora.cli import main
from manylora.config.model_folder import local_model
from manylora.errors import ConfigError
from manylora.generation.tokenizer import Tokenizer
from manylora.kernels import native
from manylora.kernels.device import open_device
from manylora.kernels.panels import BLOCKS, Panels, look_up
from manylora.model.decoder import Decoder

TARGETS = ("attn_q", "attn_k", "attn_dense", "mlp_4h_to_h")
WIDE = {"hidden_size": 256, "intermediate_size": 256}  # whole blocks of the K types
USUAL = (
    Kind.Q4_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q6_K, Kind.IQ4_XS, Kind.MXFP4,
    Kind.IQ2_XXS, Kind.BF16,
)  # fmt: skip
OTHERS = (Kind.Q4_1, Kind.Q5_0, Kind.Q5_K, Kind.IQ4_NL, Kind.TQ2_0, Kind.F32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(model: Path) -> Decoder:
    decoder: Decoder = decoder_of(local_model(model), 64)
    return decoder


def logits_of(model: Path, *sequences: list[int]) -> list[torch.Tensor]:
    return Driver(opened(model), list(sequences), [None] * len(sequences)).run()


def test_values_are_those_of_gguf_py() -> None:
    """Of any bits, for each type."""
    random = np.random.default_rng(0)
    for name in READ[len(PLAIN) :]:
        values, size = gguf.GGML_QUANT_SIZES[Kind[name]]
        blocks = random.integers(0, 256, (7, 1024 // values * size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            wanted = gguf.dequantize(blocks, Kind[name])
            found = widen(name, torch.from_numpy(blocks), 1024).numpy()
        known = ~np.isnan(wanted)
        assert found.shape == (7, 1024) and known.mean() > 0.8
        assert np.array_equal(found.view(np.uint32)[known], wanted.view(np.uint32)[known]), name
        assert np.array_equal(np.isnan(found), ~known)


@pytest.mark.skipif(native.load() is None, reason="no compiled kernels")
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_laid_out_as_their_values(kind: str) -> None:
    """Any bytes, as panels straight from the file and by way of tensors."""
    inputs, size = block_sizes()[kind]
    data = torch.randint(0, 256, (37, 512 // inputs * size), dtype=torch.uint8)
    blocks = data.view(37, -1, size)
    for at in {"Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)}.get(kind, (1, 3)[: 1 + kind.endswith("_1")]):
        blocks[:, :, at] &= 0xBF  # no infinite scales
    ops = open_device("cpu").ops
    found, expected = ops.pack_blocks(kind, data, 512), ops.pack(read_blocks(kind, data, 512))
    assert isinstance(found, Panels) and isinstance(expected, Panels)
    padded = len(found.values) * native.load().panel_width()  # type: ignore[union-attr]
    assert found.nbytes <= 1.03 * padded * data.shape[1]  # as many as in the file
    ids = torch.arange(37)
    assert torch.equal(look_up(ids, found), look_up(ids, expected))
    for rows in (1, 2, 3, 7, 40):  # each of the kernel's ways to divide its work
        x = torch.randn(rows, 512)
        assert torch.equal(ops.linear(x, found, None), ops.linear(x, expected, None)), rows


@pytest.mark.parametrize("kind", [*USUAL, *extended(*OTHERS)])
def test_each_type_answers_as_its_wide_values(kind: Kind, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", **WIDE)
    wide = make_gguf(tmp_path / "tiny.gguf", model, kind, kind)
    sequences = tokens(40), tokens(1, 3)
    for ids, found in zip(sequences, logits_of(tmp_path / "tiny.gguf", *sequences), strict=True):
        assert agree(found, reference_logits(wide, None, ids))


def test_an_adapter_in_the_batch_and_a_build(tmp_path: Path) -> None:
    """DoRA too, which reads the base's weights. Two kinds of blocks in one fused weight are kept apart."""
    model = make_model(tmp_path / "model", "llama", **WIDE)
    file = tmp_path / "tiny.gguf"
    wide = make_gguf(file, model, Kind.Q4_K, Kind.Q6_K)
    modules = ("q_proj", "k_proj", "o_proj", "down_proj")
    adapters = [
        make_adapter(tmp_path / name, wide, number, modules=modules, use_dora=name == "dora")
        for number, name in enumerate(("lora", "dora"), 1)
    ]
    built = tmp_path / "built"
    assert main(["build", "--model_dir", str(file), "--output_dir", str(built)]) == 0
    assert main(["inspect", str(adapters[1]), "--base", str(file)]) == 0
    prompts = [tokens(30), tokens(12, 3), tokens(30)]
    requests = [None, *(LoRARequest(one.name, n, str(one)) for n, one in enumerate(adapters, 1))]
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    for served in (file, built):
        with LLM(
            served, dtype="float32",
            lora_config=LoraConfig(lora_target_modules=list(TARGETS), max_lora_rank=8),
            kv_cache_config=KvCacheConfig(max_tokens=512),
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, sampling, lora_request=requests)
        for ids, adapter, output in zip(prompts, [None, *adapters], outputs, strict=True):
            check_greedy(output.outputs[0].token_ids, 8, wide, adapter, ids)


def header(*parts: bytes, version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


ARRAY_OF_TEXTS = text(b"k") + struct.pack("<II", 9, 8)
HOSTILE = {
    "no magic": (b"GGML" + bytes(60), "does not begin with GGUF"),
    "version": (header(version=1), "its version is 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "keys": (header(keys=2**60), "metadata keys"),
    "tensors": (header(tensors=2**60), "tensors"),
    "a long key": (header(struct.pack("<Q", 2**62), keys=1), "bytes"),
    "texts": (header(ARRAY_OF_TEXTS, struct.pack("<Q", 2**40), keys=1), "1099511627776 texts"),
    "numbers": (header(text(b"k"), struct.pack("<IIQ", 9, 4, 2**61), keys=1), "ends"),
    "lists of lists": (header(text(b"k"), struct.pack("<IIQ", 9, 9, 1), keys=1), "array of type 9"),
    "a type": (header(text(b"k"), struct.pack("<I", 77), keys=1), "type 77"),
    "dimensions": (header(text(b"t"), struct.pack("<I", 2**31), tensors=1), "dimensions"),
    "a shape": (header(text(b"t"), struct.pack("<IQIQ", 1, 2**63, 0, 0), tensors=1), "shape"),
    "an offset": (
        header(text(b"t"), struct.pack("<IQIQ", 1, 8, 0, 2**62), tensors=1),
        "does not lie in the file",
    ),
    "Q8_K": (header(text(b"t"), struct.pack("<IQIQ", 1, 256, 15, 0), tensors=1), "Q8_K, which is not read"),
    "an unknown type": (
        header(text(b"t"), struct.pack("<IQIQ", 1, 32, 999, 0), tensors=1),
        "type 999, which is not read",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_cannot_be_read_says_why(name: str, tmp_path: Path) -> None:
    data, said = HOSTILE[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=said) as raised:
        local_model(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    make_gguf(tmp_path / "whole.gguf", make_model(tmp_path / "model", "llama"), Kind.Q8_0)
    data = (tmp_path / "whole.gguf").read_bytes()
    for count in (3, 30, 700, 5000, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.gguf").write_bytes(data[:count])
        with pytest.raises(ConfigError, match="GGUF"):
            local_model(tmp_path / "cut.gguf")


def in_parts(folder: Path) -> tuple[list[Path], Path]:
    wide = make_gguf(folder / "m.gguf", make_model(folder / "model", "llama"), Kind.Q8_0, in_part=8)
    return sorted(folder.glob("m-*.gguf")), wide


def test_a_file_in_parts_answers_as_its_wide_values(tmp_path: Path) -> None:
    """From the name of any part, with an adapter whose norms are of the base."""
    parts, wide = in_parts(tmp_path)
    assert len(parts) == 3 and parts[0].name == "m-00001-of-00003.gguf"
    folders = {local_model(part) for part in parts}
    assert len(folders) == 1
    adapter = make_adapter(tmp_path / "a", wide, 1, modules=("q_proj", "down_proj"), use_dora=True)
    read = read_from(adapter, folders.pop())
    found = Driver(opened(parts[1]), [tokens(20)] * 2, [None, read]).run()
    assert agree(found[0], reference_logits(wide, None, tokens(20)))
    assert agree(found[1], reference_logits(wide, adapter, tokens(20)))


def test_parts_that_do_not_belong_together_are_refused_by_name(tmp_path: Path) -> None:
    parts, _ = in_parts(tmp_path)
    last = parts[2].read_bytes()
    parts[2].unlink()
    with pytest.raises(ConfigError, match=r"m-00003-of-00003.gguf is missing \(1 of the 3 parts"):
        local_model(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ConfigError, match=r"00003.gguf: its split.no and split.count are 1 and 3, and by"):
        local_model(parts[0])
    parts[2].write_bytes(last[:-40])
    with pytest.raises(ConfigError, match=r"00003-of-00003.gguf .*does not lie in the file"):
        local_model(parts[0])
    parts[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(ConfigError, match=r"alone.gguf: its split.no and split.count are 0 and 3"):
        local_model(tmp_path / "alone.gguf")
    with pytest.raises(ConfigError, match="part 1 of 99999; read are 1 to 1000 parts"):
        local_model(tmp_path / "x-00001-of-99999.gguf")
    (tmp_path / "y-00001-of-00001.gguf").write_bytes(
        header(text(b"split.count"), struct.pack("<I", 8), text(b"many"), keys=1)
    )
    with pytest.raises(ConfigError, match="are 0 and many, and by its name they are 0 and 1"):
        local_model(tmp_path / "y-00001-of-00001.gguf")


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    for number, (arch, key, value, said) in enumerate((
        ("mamba", "general.name", "x", "GGUF architecture mamba is not read; read are llama"),
        ("gemma", "gemma.expert_count", "8", "gemma with experts is not read"),
        ("qwen2moe", "general.name", "x", "qwen2moe is not read"),
        ("llama", "general.type", "adapter", "holds no base model"),
    )):  # fmt: skip
        path = tmp_path / f"{number}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_string(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ConfigError, match=said):
            local_model(path)


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


CUTS = (
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
    for pre, text, wanted in CUTS:
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


PIECES = ["▁", "h", "e", "l", "o", "w", "he", "ll", "▁he", "llo", "hello", "▁hello", "▁w"]


def with_pieces(path: Path, special: Sequence[str], bos: int, eos: int, unk: int, finish: Any) -> Tokenizer:
    """Of bytes, which stand for what is unknown, and PIECES. finish: adds what is special to the file."""

    def write(writer: gguf.GGUFWriter) -> None:
        kinds, count = gguf.TokenType, len(special)
        types = [kinds.UNKNOWN if number == unk else kinds.CONTROL for number in range(count)]
        writer.add_token_list([*special, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES])
        writer.add_token_types([*types, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(PIECES)])
        for name, number in (("bos", bos), ("eos", eos), ("unk", unk)):
            getattr(writer, f"add_{name}_token_id")(number)
        finish(writer)

    return Tokenizer(with_tokenizer(path, path.parent, write))


def test_sentence_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    """Ids as of Llama 2: a space in front, the best pair first, bytes for what is unknown."""

    def finish(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * 259 + [-100.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -99.0, -5.0, -6.0])

    ours = with_pieces(tmp_path / "a.gguf", ("<unk>", "<s>", "</s>"), 1, 2, 0, finish)

    def numbers(*found: str) -> list[int]:
        return [259 + PIECES.index(one) for one in found]

    assert ours.encode("hello who") == [1, *numbers("▁hello", "▁w", "h", "o")]
    assert ours.encode("é</s>") == [1, *numbers("▁"), 3 + 0xC3, 3 + 0xA9, 2]
    for text in ("hello who", "é", "🙂 low"):
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(("model", "pre"), [("gemma4", "default"), ("gpt2", "sarvam-moe")])
def test_merges_of_a_tokenizer_with_spaces_as_marks_are_those_of_the_file(
    model: str, pre: str, tmp_path: Path
) -> None:
    """As of Gemma 4: no space in front."""

    def finish(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_add_bos_token(True)
        writer.add_token_merges(["h e", "l l", "ll o", "he llo", "▁ hello"])
        writer.add_add_space_prefix(False)

    ours = with_pieces(tmp_path / "a.gguf", ("<pad>", "<eos>", "<bos>", "<unk>"), 2, 1, 3, finish)
    assert ours.encode("hello hello") == [2, *(260 + PIECES.index(one) for one in ("hello", "▁hello"))]
    for text in ("hello  he", "é", "\n\n"):
        assert ours.decode(ours.encode(text)) == text
