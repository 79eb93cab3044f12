"""Protects GGUF files of each architecture: answers those of the model's own directory, from a file as
llama.cpp's converter writes it.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from driver import Driver, agree
from gguf import GGMLQuantizationType as Kind
from gguf_converter import ARCHITECTURES as BY_TYPE
from gguf_converter import convert
from parity import read_from
from running import tokens
from safetensors.torch import load_file, save_file
from selection import extended
from tiny_configs import FAMILIES, MOE_FAMILIES
from tiny_models import make_adapter, make_model, reference_logits

from manylora.checkpoints.gguf.config import ARCHITECTURES
from manylora.checkpoints.gguf.container import read_header
from manylora.config.engine import EngineConfig
from manylora.config.model_folder import local_model
from manylora.engine.requests import RequestChecks
from manylora.errors import ConfigError, RequestError
from manylora.kernels.device import open_device
from manylora.model.checkpoint import read_model_config
from manylora.model.weights import load_decoder
from manylora.request import LoraInput, Request

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
KINDS = {**FAMILIES, **MOE_FAMILIES}
OTHERS = [name for name in KINDS if name not in LEFT_OUT and name not in USUAL]
ENCODERS = {"bert", "nomic-bert", "modern-bert", "gemma-embedding"}  # of other tests


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    convert(folder / "tiny.gguf", make_model(folder / "model", "qwen3.5"))
    return folder / "tiny.gguf"


def check(file: Path, model: Path) -> None:
    folder = local_model(file)
    decoder = load_decoder(folder, read_model_config(folder), torch.float32, open_device("cpu"), 64)
    sequences = tokens(60), tokens(1, 3)
    found = Driver(decoder, list(sequences), [None, None]).run()
    for ids, logits in zip(sequences, found, strict=True):
        assert agree(logits, reference_logits(model, None, ids))


@pytest.mark.parametrize("family", [*USUAL, *extended(*OTHERS)])
def test_answers_as_its_directory(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family, **SETTINGS.get(family, {}))
    convert(tmp_path / "tiny.gguf", model)
    check(tmp_path / "tiny.gguf", model)


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
    check(tmp_path / "tiny.gguf", model)


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
    decoder = load_decoder(folder, read_model_config(folder), torch.float32, open_device("cpu"), 64)
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
            load_decoder(folder, read_model_config(folder), torch.float32, open_device("cpu"), 64)
        assert "\n" not in str(raised.value)


def test_a_file_without_its_multipliers_takes_no_adapters(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "falcon-h1", num_hidden_layers=1)
    convert(tmp_path / "tiny.gguf", model)
    folder, request = local_model(tmp_path / "tiny.gguf"), Request((1,), lora=LoraInput(1))
    with pytest.raises(RequestError, match=r"GGUF file of Falcon-H1: .* serve the original model"):
        RequestChecks(EngineConfig(folder), read_model_config(folder), 64).check(request)
    RequestChecks(EngineConfig(model), read_model_config(model), 64).check(request)


def test_each_architecture_is_tested() -> None:
    tested = {BY_TYPE.get(KINDS[name][0], KINDS[name][0]) for name in (*USUAL, *OTHERS)} | ENCODERS
    assert {name.partition(" ")[0] for name in ARCHITECTURES} == {*tested, "nemotron_h"}  # as with experts
