"""GGUF files of tiny models, written by gguf-py, and the same models with their values made wide."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

ARCHITECTURES = {"gemma3_text": "gemma3"}
TURNED, PLUS_ONE = ("llama",), ("gemma", "gemma2", "gemma3")
HALVES = {
    "Q6_K": (208,),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q8_0": (0,),
}  # where a block has a float16; else (0, 2)


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Any bits in a block but for its scales, which make values of about 0.2. uint8 [rows, bytes]."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for at in HALVES.get(kind.name, (0, 2)):
        blocks[..., at : at + 2] = np.array([1], "<f2").view(np.uint8)
    off = np.abs(gguf.dequantize(blocks.reshape(rows, -1), kind)).mean()
    scales = random.uniform(0.1, 0.3, (rows, columns // values, 1)).astype(np.float32) / off
    for at in HALVES.get(kind.name, (0, 2)):
        blocks[..., at : at + 2] = scales.astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def encode(weight: np.ndarray, kind: Kind, seed: int) -> np.ndarray:
    """gguf-py quantises to some types; of the others, random blocks are as good."""
    try:
        return gguf.quantize(weight, kind)
    except NotImplementedError:
        return random_blocks(kind, *weight.shape, seed)


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter orders the rows of q and k."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def turned_back(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def make_gguf(
    path: Path, model: Path, kind: Kind, embedding: Kind = Kind.F32, in_part: int = 0, **metadata: Any
) -> Path:
    """Writes `path` from a Hugging Face directory, and returns a copy of that with the file's values.

    kind: of all matrices; embedding: of the embedding. in_part: > 0: in parts of so many tensors.
    """
    config = json.loads((model / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    number = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=in_part)
    _write_sizes(writer, config, arch)
    write_tokenizer(writer, model, config["vocab_size"])
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    wide: dict[str, torch.Tensor] = {}
    for seed, (name, tensor) in enumerate(load_file(model / "model.safetensors").items()):
        weight, heads = tensor.float().numpy(), None
        if arch in TURNED and "q_proj" in name:
            heads = config["num_attention_heads"]
        elif arch in TURNED and "k_proj" in name:
            heads = config["num_key_value_heads"]
        stored = embedding if "embed_tokens" in name else kind if weight.ndim > 1 else Kind.F32
        stored_weight = weight if heads is None else turned(weight, heads)
        if arch in PLUS_ONE and name.endswith("norm.weight"):
            stored_weight = stored_weight + 1
        data = encode(np.ascontiguousarray(stored_weight), stored, seed)
        their_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(their_name, data, raw_dtype=None if stored in (Kind.F32, Kind.F16) else stored)
        found = gguf.dequantize(data, stored).reshape(weight.shape)
        found = found if heads is None else turned_back(found, heads)
        found = found - 1 if arch in PLUS_ONE and name.endswith("norm.weight") else found
        wide[name] = torch.from_numpy(np.ascontiguousarray(found))
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rotary_factors(rope, 64 // 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = path.parent / f"{path.stem}-wide"
    shutil.copytree(model, target)
    save_file(wide, target / "model.safetensors", metadata={"format": "pt"})
    return target


def rotary_factors(rope: dict[str, Any], size: int) -> np.ndarray:
    """What llama.cpp's converter makes of Llama 3's scaling: a divisor of each frequency."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    context = rope["original_max_position_embeddings"]
    smooth = (context / waves - low) / (high - low)
    blended = np.where(waves > context / low, factor, 1 / ((1 - smooth) / factor + smooth))
    return np.where(waves < context / high, 1.0, blended).astype(np.float32)


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    flat = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(flat.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(int(head_dim * flat.get("partial_rotary_factor", 1.0)))
    if arch in ("gemma2", "gemma3", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if flat.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(flat["rope_type"]))
        writer.add_rope_scaling_factor(flat["factor"])
        if "original_max_position_embeddings" in flat:
            writer.add_rope_scaling_orig_ctx_len(flat["original_max_position_embeddings"])


def write_tokenizer(writer: gguf.GGUFWriter, model: Path, size: int, pre: str = "gpt-2") -> None:
    """A byte-level one, as llama.cpp's converter writes it."""
    path = model / "tokenizer.json"
    library, spec = Tokenizer.from_file(str(path)), json.loads(path.read_text())
    settings = json.loads((model / "tokenizer_config.json").read_text())
    added = library.get_added_tokens_decoder()
    tokens, types = [], []
    for number in range(size):
        token = library.id_to_token(number)
        special = number in added and added[number].special
        kind = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        types.append(
            gguf.TokenType.UNUSED if token is None else kind if number in added else gguf.TokenType.NORMAL
        )
        tokens.append(f"[PAD{number}]" if token is None else token)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]])
    for name in ("bos", "eos", "pad"):
        if settings.get(f"{name}_token") is not None:
            getattr(writer, f"add_{name}_token_id")(library.token_to_id(settings[f"{name}_token"]))
    writer.add_add_bos_token("TemplateProcessing" in str(spec["post_processor"]))
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])
