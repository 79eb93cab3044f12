"""Reads a checkpoint's safetensors into a Decoder: each tensor once, straight into its fused place."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manylora.config import ModelConfig
from manylora.device import Device
from manylora.errors import ConfigError
from manylora.model.decoder import Decoder

__all__ = ["compute_dtype", "load_decoder"]

# Buffers that some checkpoints carry and that the configuration determines.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class _Part:
    """Our tensor is these checkpoint tensors stacked along rows; row counts, and columns (0: a vector)."""

    sources: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int = 0


def compute_dtype(choice: str, config: ModelConfig, device: Device) -> torch.dtype:
    """`auto` takes the checkpoint's; on a CPU float32 in place of float16, which CPUs compute slowly."""
    if choice == "auto":
        choice = config.dtype
        if device.torch.type == "cpu" and choice == "float16":
            choice = "float32"
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[choice]


def load_decoder(model_dir: Path, config: ModelConfig, dtype: torch.dtype, device: Device) -> Decoder:
    """Weights of `model_dir` in `dtype` on `device`. Raises ConfigError naming a missing, unknown or
    wrongly shaped tensor, or a broken file."""
    plan = _plan(config)
    with ExitStack() as stack:
        files = _open_files(Path(model_dir), stack)
        _check_names(files, plan, config)
        weights: dict[str, Tensor] = {}
        for name, part in plan.items():  # packed one by one, so that no more than one matrix is here twice
            tensor = _read(part, files, dtype, device)
            weights[name] = device.ops.pack(tensor) if part.columns and name != "embed" else tensor
    if config.tie_word_embeddings:
        weights["head"] = device.ops.pack(weights["embed"])
    return Decoder(config, weights, device.ops)


def _plan(config: ModelConfig) -> dict[str, _Part]:
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv, head = config.q_size, config.kv_size, config.head_dim
    plan = {
        "embed": _Part(("model.embed_tokens.weight",), (vocab,), hidden),
        "norm": _Part(("model.norm.weight",), (hidden,)),
    }
    if not config.tie_word_embeddings:
        plan["head"] = _Part(("lm_head.weight",), (vocab,), hidden)
    for layer in range(config.num_layers):
        base = f"model.layers.{layer}."
        attention, mlp = base + "self_attn.", base + "mlp."
        linears: list[tuple[str, tuple[str, ...], tuple[int, ...], int, bool]] = [
            (
                "qkv",
                tuple(attention + f"{n}_proj" for n in "qkv"),
                (q, kv, kv),
                hidden,
                config.attention_bias,
            ),
            ("out", (attention + "o_proj",), (hidden,), q, config.attention_out_bias),
            ("up_gate", (mlp + "up_proj", mlp + "gate_proj"), (inner, inner), hidden, config.mlp_bias),
            ("down", (mlp + "down_proj",), (hidden,), inner, config.mlp_bias),
        ]
        for name, sources, rows, columns, biased in linears:
            plan[f"{layer}.{name}.weight"] = _Part(tuple(s + ".weight" for s in sources), rows, columns)
            if biased:
                plan[f"{layer}.{name}.bias"] = _Part(tuple(s + ".bias" for s in sources), rows)
        plan[f"{layer}.attention_norm"] = _Part((base + "input_layernorm.weight",), (hidden,))
        plan[f"{layer}.mlp_norm"] = _Part((base + "post_attention_layernorm.weight",), (hidden,))
        if config.qk_norm:
            plan[f"{layer}.q_norm"] = _Part((attention + "q_norm.weight",), (head,))
            plan[f"{layer}.k_norm"] = _Part((attention + "k_norm.weight",), (head,))
    return plan


def _open_files(model_dir: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> open file that has it."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} is not a safetensors index: {error}") from error
    else:
        names = ["model.safetensors"]
    found: dict[str, Any] = {}
    for name in names:
        path = model_dir / Path(name).name
        if not path.is_file():
            raise ConfigError(f"{path} does not exist: weights are read from safetensors files")
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
        found.update(dict.fromkeys(file.keys(), file))
    return found


def _check_names(files: dict[str, Any], plan: dict[str, _Part], config: ModelConfig) -> None:
    wanted = {source for part in plan.values() for source in part.sources}
    missing = sorted(wanted - files.keys())
    if missing:
        raise ConfigError(f"the checkpoint lacks {missing[0]} ({len(missing)} tensors missing)")
    unknown = {n for n in files.keys() - wanted if not n.endswith(IGNORED_SUFFIXES)}
    if config.tie_word_embeddings:
        unknown.discard("lm_head.weight")
    if unknown:
        raise ConfigError(
            f"the checkpoint holds {min(unknown)}, which {config.architecture} with this config.json does "
            f"not use ({len(unknown)} such tensors)"
        )


def _read(part: _Part, files: dict[str, Any], dtype: torch.dtype, device: Device) -> Tensor:
    shape = (sum(part.rows), part.columns) if part.columns else (sum(part.rows),)
    fused = torch.empty(shape, dtype=dtype, device=device.torch)
    start = 0
    for source, rows in zip(part.sources, part.rows, strict=True):
        tensor = files[source].get_tensor(source)
        expected = (rows, part.columns) if part.columns else (rows,)
        if tuple(tensor.shape) != expected:
            raise ConfigError(f"{source} must be {expected} by config.json, got {tuple(tensor.shape)}")
        fused[start : start + rows].copy_(tensor)
        start += rows
    return fused
