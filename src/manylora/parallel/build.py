"""build_rank: the parts of a model that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from manylora.config.engine import EngineConfig, ModelConfig
from manylora.kernels.device import Device
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.weights import compute_dtype, load_weights
from manylora.parallel.adapters import AdapterSlicer
from manylora.parallel.collectives import Collectives
from manylora.parallel.decoder import RankDecoder
from manylora.parallel.mapping import Mapping
from manylora.parallel.rank_model import rank_config
from manylora.parallel.weights import rank_plan
from manylora.quant.config import QuantConfig


@dataclass(frozen=True)
class RankModel:
    """model: the whole one. local: this rank's part, whose sizes the caches and the kernels have. dtype: the
    compute dtype. decoder: gives logits on rank 0, and no rows elsewhere."""

    model: ModelConfig
    local: ModelConfig
    dtype: torch.dtype
    decoder: Decoder
    slicer: AdapterSlicer


def build_rank(config: EngineConfig, mapping: Mapping, collectives: Collectives, device: Device) -> RankModel:
    """Reads this rank's weights. Raises ConfigError."""
    model = read_model_config(config.model_dir)
    dtype = compute_dtype(config.dtype, model, device)
    decoder = load_rank(config.model_dir, model, dtype, device, mapping, collectives, config.quant)
    slicer = AdapterSlicer(model, mapping, config.lora.target_modules, collectives.least)
    return RankModel(model, decoder.config, dtype, decoder, slicer)


def load_rank(
    model_dir: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    mapping: Mapping,
    collectives: Collectives,
    quant: QuantConfig | None = None,
) -> RankDecoder:
    """As `load_decoder`, of one rank."""
    local = rank_config(model, mapping)
    found, weights = load_weights(
        model_dir, model, dtype, device, quant, lambda plan: rank_plan(plan, model, mapping)
    )
    local = replace(local, tie_word_embeddings=found.tie_word_embeddings)
    _fill_ends(weights, local, dtype, device, mapping)
    return RankDecoder(local, model, weights, dtype, device.ops, mapping, collectives)


def _fill_ends(
    weights: dict[str, Any], local: ModelConfig, dtype: torch.dtype, device: Device, mapping: Mapping
) -> None:
    """A head that is tied to the embedding, and empty tensors for what this stage does not have."""
    empty = torch.empty((0, local.hidden_size), dtype=dtype, device=device.torch)
    if "head.weight" not in weights and mapping.is_last_stage:
        weights["head.weight"] = device.ops.pack(weights["embed"])
    weights.setdefault("head.weight", empty)
    weights.setdefault("embed", empty)
