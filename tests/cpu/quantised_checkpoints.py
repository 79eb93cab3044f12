"""Quantised checkpoints by hand: random integers packed as each writer packs them, and beside them the plain
model that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from manylora.checkpoints.quant.layouts import STATE

GROUP = 16
LINEAR = (".q_proj.weight", ".k_proj.weight", ".v_proj.weight", ".o_proj.weight", ".up_proj.weight",
          ".gate_proj.weight", ".down_proj.weight", ".qkv_proj.weight", ".gate_up_proj.weight",
          ".query_key_value.weight", ".dense.weight", ".dense_h_to_4h.weight", ".dense_4h_to_h.weight",
          ".w1.weight", ".w2.weight", ".w3.weight", "_a_proj.weight", "_b_proj.weight",
          "_with_mqa.weight")  # fmt: skip
Tensors = dict[str, torch.Tensor]
Packer = Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]


def to_words(values: np.ndarray, bits: int, axis: int, places: tuple[int, ...] = ()) -> torch.Tensor:
    """Values from 0 up, so many to an int32 along an axis; places: which value lies where in a word."""
    count = 32 // bits
    moved = np.moveaxis(values, axis, -1).astype(np.uint64)
    moved = moved.reshape(*moved.shape[:-1], -1, count)
    words = np.zeros(moved.shape[:-1], np.uint64)
    for place in range(count):
        words |= moved[..., (places or range(count))[place]] << np.uint64(place * bits)
    words = np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))
    return torch.from_numpy(words)


def drawn(rng: np.random.Generator, rows: int, columns: int, bits: int, groups: np.ndarray, sym: bool) -> Any:
    """q [N, K] and zeros [N, G] from 0 up, scales [N, G] in float16, and (q - zero) * scale."""
    count = int(groups.max()) + 1
    q = rng.integers(0, 2**bits, (rows, columns))
    zeros = rng.integers(0, 2**bits, (rows, count))
    zeros[:, 0] = 0
    if sym:
        zeros[:] = 2 ** (bits - 1)
    scales = (rng.uniform(0.5, 1.5, (rows, count)) / 2 ** (bits + 2)).astype(np.float16)
    wide = (q - zeros[:, groups]) * scales.astype(np.float32)[:, groups]
    return q, zeros, scales, wide.astype(np.float32)


def even(columns: int, size: int) -> np.ndarray:
    return np.arange(columns) // size


def awq(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    q, zeros, scales, wide = drawn(rng, rows, columns, 4, even(columns, GROUP), False)
    interleaved = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": to_words(q.T, 4, 1, interleaved),
        "qzeros": to_words(zeros.T, 4, 1, interleaved),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
    }, wide


def gptq(bits: int, *, desc_act: bool = False, sym: bool = True, shift: int = 1, size: int = GROUP) -> Packer:
    def pack(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        groups = even(columns, size if size > 0 else columns)
        if desc_act:
            groups = rng.permutation(groups)
        q, zeros, scales, wide = drawn(rng, rows, columns, bits, groups, sym)
        return {
            "qweight": to_words(q.T, bits, 0),
            "qzeros": to_words((zeros.T - shift) % 2**bits, bits, 1),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }, wide

    return pack


def packed(bits: int, *, sym: bool = True, by_activation: bool = False, size: int = GROUP) -> Packer:
    def pack(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        groups = even(columns, size if size > 0 else columns)
        if by_activation:
            groups = rng.permutation(groups)
        q, zeros, scales, wide = drawn(rng, rows, columns, bits, groups, sym)
        tensors = {
            "weight_packed": to_words(q, bits, 1),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not sym:
            tensors["weight_zero_point"] = to_words(zeros, bits, 0)
        if by_activation:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, wide

    return pack


def float8(kind: str) -> Packer:
    """kind: tensor, row, or block of 32 x 32."""

    def pack(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        values = torch.from_numpy(rng.uniform(-100, 100, (rows, columns))).to(torch.float8_e4m3fn)
        shape = {"tensor": (1, 1), "row": (rows, 1), "block": (-(-rows // 32), -(-columns // 32))}[kind]
        scales = rng.uniform(1, 2, shape).astype(np.float32) / 2000
        wide = np.repeat(np.repeat(scales, -(-rows // shape[0]), 0), -(-columns // shape[1]), 1)
        if kind == "block":
            wide = np.repeat(np.repeat(scales, 32, 0), 32, 1)
        wide = values.float().numpy() * wide[:rows, :columns]
        tensors = {"weight": values}
        if kind == "tensor":
            return tensors | {
                "weight_scale": torch.tensor(scales[0, 0]),
                "input_scale": torch.tensor(0.5),
            }, wide
        name = "weight_scale_inv" if kind == "block" else "weight_scale"
        return tensors | {name: torch.from_numpy(scales)}, wide

    return pack


def int8(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    values = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    scales = rng.uniform(0.5, 1, (rows, 1)).astype(np.float32) / 1000
    return {"weight": torch.from_numpy(values), "weight_scale": torch.from_numpy(scales)}, values * scales


QUANT_MAP = load_file(Path(__file__).with_name("bitsandbytes.safetensors"))["nf4.weight.quant_map"]


def nf4(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    codes = rng.integers(0, 16, rows * columns, np.uint8)
    absmax = rng.uniform(0, 0.5, rows * columns // 64).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [rows, columns]}
    tensors = {
        "weight": torch.from_numpy((codes[::2] << 4) | codes[1::2]).unsqueeze(1),
        "weight.absmax": torch.from_numpy(absmax),
        "weight.quant_map": QUANT_MAP.clone(),
        f"{STATE}nf4": torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, (QUANT_MAP.numpy()[codes].reshape(-1, 64) * absmax[:, None]).reshape(rows, columns)


def llm_int8(rng: np.random.Generator, rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    codes = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    largest = rng.uniform(0, 0.5, rows).astype(np.float32)
    tensors = {"weight": codes, "SCB": largest, "weight_format": np.array(0, np.uint8)}
    return {name: torch.from_numpy(one) for name, one in tensors.items()}, codes * (largest / 127)[:, None]


def compressed(layout: str, kind: str, bits: int) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "symmetric": True, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Kind:
    """quantization_config, how a layer is packed, TensorRT-LLM's name, and the family it is tried on."""

    config: dict[str, Any]
    pack: Packer
    algo: str
    family: str = "llama"


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [32, 32]}
KINDS = {
    "awq": Kind(AWQ, awq, "W4A16_AWQ"),
    "awq fused": Kind(AWQ, awq, "W4A16_AWQ", "phi3"),
    "gptq": Kind(GPTQ, gptq(4), "W4A16_GPTQ"),
    "gptq 8": Kind({**GPTQ, "bits": 8}, gptq(8), "W8A16_GPTQ"),
    "gptq 8 whole rows": Kind({**GPTQ, "bits": 8, "group_size": -1}, gptq(8, size=-1), "W8A16_GPTQ"),
    "gptq zero points": Kind({**GPTQ, "sym": False}, gptq(4, sym=False), "W4A16_GPTQ"),
    "gptq 8 zero points": Kind({**GPTQ, "bits": 8}, gptq(8, sym=False), "W8A16_GPTQ"),
    "gptq_v2": Kind(
        {**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, sym=False, shift=0), "W4A16_GPTQ"
    ),
    "gptq in order": Kind({**GPTQ, "desc_act": True}, gptq(4, desc_act=True, sym=False), "W4A16_GPTQ"),
    "gptq 8 in order": Kind({**GPTQ, "bits": 8}, gptq(8, desc_act=True), "W8A16_GPTQ"),
    "gptq fused, in order": Kind(GPTQ, gptq(4, desc_act=True), "W4A16_GPTQ", "phi3"),
    "gptq by heads": Kind(GPTQ, gptq(4, desc_act=True), "W4A16_GPTQ", "gpt-neox"),
    "packed 4": Kind(compressed("pack-quantized", "int", 4), packed(4), "W4A16"),
    "packed 4 zero points": Kind(compressed("pack-quantized", "int", 4), packed(4, sym=False), "W4A16"),
    "packed 4 in order": Kind(
        compressed("pack-quantized", "int", 4), packed(4, by_activation=True), "W4A16"
    ),
    "packed 8": Kind(compressed("pack-quantized", "int", 8), packed(8, size=-1), "W8A16"),
    "int8": Kind(compressed("int-quantized", "int", 8), int8, "W8A16"),
    "fp8 by tensor": Kind(FP8, float8("tensor"), "FP8"),
    "fp8 by row": Kind(compressed("float-quantized", "float", 8), float8("row"), "FP8"),
    "fbgemm": Kind({"quant_method": "fbgemm_fp8"}, float8("row"), "FP8_PER_CHANNEL_PER_TOKEN"),
    "fp8 by block": Kind(BLOCKS, float8("block"), "FP8_BLOCK_SCALES"),
    "fp8 by block, fused": Kind(BLOCKS, float8("block"), "FP8_BLOCK_SCALES", "phi3"),
    "fp8 by block, latents": Kind(BLOCKS, float8("block"), "FP8_BLOCK_SCALES", "deepseek-v3"),
    "nf4": Kind({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4, "W4A16"),
    "llm.int8": Kind({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, "W8A16"),
    "awq experts": Kind(AWQ, awq, "W4A16_AWQ", "mixtral"),
    "gptq experts": Kind(GPTQ, gptq(4, desc_act=True), "W4A16_GPTQ", "qwen2-moe"),
    "fp8 experts": Kind(BLOCKS, float8("block"), "FP8_BLOCK_SCALES", "qwen3-moe"),
}  # fmt: skip


def make_pair(
    folder: Path,
    kind: Kind,
    *,
    seed: int = 1,
    plain: tuple[str, ...] = (),
    wide: Path | None = None,
    linear: tuple[str, ...] = LINEAR,
) -> tuple[Path, Path]:
    """A quantised checkpoint, and a plain one of the same values in float32. plain: ends of the names of
    linear layers that are left as they are. wide: a model, whose file is written again; None: of the kind's
    family. linear: ends of the names of linear layers."""
    wide = wide or make_model(folder / "wide", kind.family, seed=seed)
    quantised = folder / "quantised"
    shutil.copytree(wide, quantised)
    tensors = load_file(wide / "model.safetensors")
    rng, stored = np.random.default_rng(seed), {}
    for name, tensor in tensors.items():
        if not name.endswith(linear) or name.endswith(plain or "!"):
            stored[name] = tensor
            continue
        made, values = kind.pack(rng, *tensor.shape)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
        stem = name.removesuffix("weight")
        stored |= {stem + end: part.contiguous() for end, part in made.items()}
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantised / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = kind.config
    (quantised / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return quantised, wide
