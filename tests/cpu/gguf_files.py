"""GGUF files of tiny models, written by gguf-py, and the same models with their values made wide."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_converter import ARCHITECTURES, HEADS, PLUS_ONE, TURNED, open_writer, stacked, write_tokenizer
from safetensors.torch import load_file, save_file

from manylora.config.model_folder import local_model
from manylora.generation.tokenizer import Tokenizer

HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS"), (0,)), "Q6_K": (208,),
    "Q2_K": (80, 82), "Q3_K": (108,),
}  # fmt: skip
"""Where a block has a float16; else (0, 2)."""


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
    writer, named = open_writer(path, model, config, arch, in_part)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    wide: dict[str, torch.Tensor] = {}
    for seed, (name, weight) in enumerate(stacked(config, arch, load_file(model / "model.safetensors"))):
        stored = embedding if "embed_tokens" in name else kind if weight.ndim > 1 else Kind.F32
        data = encode(np.ascontiguousarray(weight), stored, seed)
        writer.add_tensor(named(name), data, raw_dtype=None if stored in (Kind.F32, Kind.F16) else stored)
        found = gguf.dequantize(data, stored).reshape(weight.shape)
        if arch in TURNED and (part := re.search(r"([qk])_proj\.", name)):
            found = turned_back(found, config[HEADS[part[1]]])
        found = found - 1 if arch in PLUS_ONE and name.endswith("norm.weight") else found
        wide[name] = torch.from_numpy(np.ascontiguousarray(found))
    wide.pop("rope_freqs.weight", None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target = path.parent / f"{path.stem}-wide"
    shutil.copytree(model, target)
    save_file(wide, target / "model.safetensors", metadata={"format": "pt"})
    return target


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
