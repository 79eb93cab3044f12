"""Reads a checkpoint's safetensors into a Decoder: each tensor once, straight into its fused place."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manylora.config import ModelConfig
from manylora.device import Device
from manylora.errors import ConfigError
from manylora.kernels.quantised import QuantisedWeight
from manylora.model.decoder import Decoder
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.plan import Part, checkpoint_plan, unused_names
from manylora.model.quant import chosen, quantise, read_quantised, stored_names, stored_parts
from manylora.quant import QuantConfig

__all__ = ["check_names", "compute_dtype", "load_decoder", "open_checkpoint"]

# Buffers that some checkpoints carry and that the configuration determines; the biases are causal masks.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attention.bias", ".masked_bias")

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def compute_dtype(choice: str, config: ModelConfig, device: Device) -> torch.dtype:
    """`auto` takes the checkpoint's; on a CPU float32 in place of float16, and of bfloat16 where the
    processor does not have it: both are slow there, and float32 loses nothing."""
    if choice == "auto":
        choice = config.dtype
        slow = choice == "float16" or (choice == "bfloat16" and not device.ops.has_bfloat16)
        if device.torch.type == "cpu" and slow:
            choice = "float32"
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[choice]


def load_decoder(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    max_seq_len: int | None = None,
    quant: QuantConfig | None = None,
) -> Decoder | EncoderDecoder:
    """Weights of `model_dir` in `dtype` on `device`, for sequences of up to max_seq_len tokens (None: what
    the model allows), linear layers as `quant` says or as they are stored. Raises ConfigError naming a
    missing, unknown or wrongly shaped tensor, or a broken file."""
    with ExitStack() as stack:
        files = open_checkpoint(Path(model_dir), stack)
        plan = checkpoint_plan(config, files)
        check_names(files, plan, config, quant)
        weights: dict[str, Any] = {}
        for name, part in plan.items():  # packed one by one, so that no more than one matrix is here twice
            tensor = _read(part, files, _dtype_here(name, part, files, dtype, device), device)
            sources = [piece.source for piece in part.pieces]
            if quant and isinstance(tensor, Tensor) and chosen(name, sources, quant):
                tensor = quantise(tensor.to(dtype), quant)
            weights[name] = device.ops.pack(tensor) if part.is_matrix else tensor
    if "head.weight" not in weights:  # it is the embedding
        weights["head.weight"] = device.ops.pack(weights["embed"])
    model = Decoder if config.encoder is None else EncoderDecoder
    return model(config, weights, dtype, device.ops, max_seq_len)


def _dtype_here(
    name: str, part: Part, files: dict[str, Any], compute: torch.dtype, device: Device
) -> torch.dtype:
    """What a tensor is held in: the compute dtype, or narrower as it is stored where nothing is lost."""
    if part.plus_one:
        return torch.float32
    if not (part.is_matrix or name == "embed"):
        return compute
    sources = {piece.source for piece in part.pieces} & files.keys()
    stored = {STORED.get(files[source].get_slice(source).get_dtype(), compute) for source in sources}
    narrow = stored.pop() if len(stored) == 1 else compute
    return narrow if device.ops.keeps(narrow, compute) else compute


def open_checkpoint(model_dir: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> open file that has it, mapped, not read. Raises ConfigError."""
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


def check_names(
    files: dict[str, Any], plan: dict[str, Part], config: ModelConfig, quant: QuantConfig | None
) -> None:
    """Raises ConfigError unless the checkpoint has what the plan names, and nothing else."""
    sources = {piece.source for part in plan.values() for piece in part.pieces}
    wanted = {name for source in sources for name in stored_names(source, files)}
    if quant and quant.any_weights and wanted != sources:
        raise ConfigError("the model directory is quantised already: leave quant_algo out")
    missing = sorted(wanted - files.keys())
    if missing:
        raise ConfigError(f"the checkpoint lacks {missing[0]} ({len(missing)} tensors missing)")
    unused = unused_names(config)
    rest = files.keys() - wanted
    unknown = {n for n in rest if not n.endswith(IGNORED_SUFFIXES) and not n.startswith(unused)}
    if unknown:
        raise ConfigError(
            f"the checkpoint holds {min(unknown)}, which {config.architecture} with this config.json does "
            f"not use ({len(unknown)} such tensors)"
        )


def _read(part: Part, files: dict[str, Any], dtype: torch.dtype, device: Device) -> Tensor | QuantisedWeight:
    if any(stored_parts(piece.source, files) for piece in part.pieces):
        return read_quantised(
            [(piece.source, piece.start, piece.rows) for piece in part.pieces],
            part.shape[1],
            files,
            lambda name, rows: files[name].get_slice(name)[rows].to(device.torch),
            dtype,
        )
    fused = torch.empty(part.shape, dtype=dtype, device=device.torch)
    start = 0
    for piece in part.pieces:
        tensor, expected = files[piece.source].get_slice(piece.source), part.stored_shape(piece)
        if tuple(tensor.get_shape()) != expected:
            raise ConfigError(
                f"{piece.source} must be {expected} by config.json, got {tuple(tensor.get_shape())}"
            )
        rows = slice(piece.start, piece.start + piece.rows)
        if piece.experts:
            values = tensor[piece.expert, rows]
        else:
            values = tensor[:, rows].T if part.transposed else tensor[rows]
        fused[start : start + piece.rows].copy_(values)
        start += piece.rows
    return fused.add_(1) if part.plus_one else fused
