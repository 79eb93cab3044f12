"""Protects GGUF files as base models: values bit for bit those of gguf-py, answers and text those of the same
model's directory, and what a stranger's file may say."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import make_gguf, random_blocks, write_tokenizer
from running import check_greedy, tokens

from manylora import LLM, KvCacheConfig, LoraConfig, LoRARequest, SamplingParams
from manylora.cli import main
from manylora.config.hub import local_model
from manylora.errors import ConfigError
from manylora.gguf import cache as gguf_cache
from manylora.gguf.blocks import LAYOUTS, read_blocks
from manylora.gguf.cache import SETTING
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.weights import load_decoder
from manylora.testing.driver import Driver, agree
from manylora.testing.parity import read_from
from manylora.testing.tiny_models import make_adapter, make_model, reference_logits
from manylora.text.tokenizer import Tokenizer

TARGETS = ("attn_q", "attn_k", "attn_dense", "mlp_4h_to_h")
WIDE = {"hidden_size": 256, "intermediate_size": 256}  # whole blocks of the K types
FAMILIES = (
    "llama", "llama-mha-tied", "llama-biases", "llama-head-dim", "llama-linear", "llama-yarn", "llama3",
    "qwen2", "qwen3", "phi3", "phi3-partial-rotary", "gemma", "gemma2", "gemma3",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def decoder_of(model: Path) -> Decoder:
    folder = local_model(model)
    return load_decoder(folder, read_model_config(folder), torch.float32, open_device("cpu"), 64)


def logits_of(model: Path, *sequences: list[int]) -> list[torch.Tensor]:
    return Driver(decoder_of(model), list(sequences), [None] * len(sequences)).run()


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_gguf_py(name: str) -> None:
    blocks = random_blocks(Kind[name], 7, 1024)
    found = read_blocks(name, torch.from_numpy(blocks), 1024)
    wanted = gguf.dequantize(blocks, Kind[name])
    assert found.shape == (7, 1024)
    assert np.array_equal(found.wide().numpy().view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_architecture_answers_as_its_directory(family: str, tmp_path: Path) -> None:
    settings = {"query_pre_attn_scalar": 24} if family in ("gemma2", "gemma3") else {}
    model = make_model(tmp_path / "model", family, **settings)
    wide = make_gguf(tmp_path / "tiny.gguf", model, Kind.F16)
    sequences = tokens(60), tokens(1, 3)
    for ids, found in zip(sequences, logits_of(tmp_path / "tiny.gguf", *sequences), strict=True):
        assert agree(found, reference_logits(wide, None, ids))


@pytest.mark.parametrize("kind", [*map(Kind.__getitem__, LAYOUTS), Kind.BF16, Kind.F32])
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


def with_tokenizer(path: Path, model: Path, write: object = None, **metadata: object) -> Path:
    """A file with no more than a tokenizer needs around it."""
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 1), np.float32))
    if callable(write):
        write(writer)
    else:
        write_tokenizer(writer, model, Tokenizer(model).vocab_size, **metadata)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return local_model(path)


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
    "IQ4_NL": (
        header(text(b"t"), struct.pack("<IQIQ", 1, 32, 20, 0), tensors=1),
        "IQ4_NL, which is not read",
    ),
    "MXFP4": (header(text(b"t"), struct.pack("<IQIQ", 1, 32, 39, 0), tensors=1), "MXFP4, which is not read"),
    "Q2_K": (header(text(b"t"), struct.pack("<IQIQ", 1, 256, 10, 0), tensors=1), "Q2_K, which is not read"),
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
    read = read_from("peft", adapter, folders.pop())
    found = Driver(decoder_of(parts[1]), [tokens(20)] * 2, [None, read]).run()
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


def test_folders_used_longest_ago_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not those that a process has."""
    model = make_model(tmp_path / "model", "llama")
    make_gguf(tmp_path / "m.gguf", model, Kind.F32)
    monkeypatch.setenv(SETTING, "2")

    def folder_of(number: int, keep: bool = False) -> Path:
        path = tmp_path / f"m{number}.gguf"
        if not path.exists():
            path.write_bytes((tmp_path / "m.gguf").read_bytes())
        folder = local_model(path)
        os.utime(folder, (number, number))
        if not keep:  # as if the process had ended
            os.close(gguf_cache._held.pop(folder))
        return folder

    first, second = folder_of(1, keep=True), folder_of(2)
    third = folder_of(3)
    assert first.is_dir() and third.is_dir() and not second.exists()
    assert folder_of(2) == second and first.is_dir() and not third.exists()
    (second / "config.json").unlink()  # as of a removal that was cut short
    assert folder_of(2) == second and (second / "config.json").is_file()
    monkeypatch.setenv(SETTING, "none")
    with pytest.raises(ConfigError, match="MANYLORA_GGUF_FOLDERS must be a whole number of at least 1"):
        folder_of(4)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    for number, (arch, key, value, said) in enumerate((
        ("mamba", "general.name", "x", "GGUF architecture mamba is not read; read are llama"),
        ("llama", "llama.expert_count", "8", "llama with experts"),
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
