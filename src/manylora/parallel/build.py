"""load_model_part: the part of a model that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from manylora.config.engine import EngineConfig
from manylora.config.model import ModelConfig
from manylora.kernels.device import Device
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.weights import compute_dtype, load_weights, tied_head
from manylora.parallel.adapters import AdapterSlicer
from manylora.parallel.collectives import Collectives
from manylora.parallel.decoder import RankDecoder, RankEncoderDecoder
from manylora.parallel.mapping import Mapping, rank_config
from manylora.parallel.weights import rank_plan
from manylora.quant.config import QuantConfig


@dataclass(frozen=True)
class ModelPart:
    """model: the whole model. local: this rank's part, whose sizes caches and kernels use. dtype: the compute
    dtype. decoder: returns logits on rank 0, and no rows elsewhere. slicer: None if there is only one rank.
    """

    model: ModelConfig
    local: ModelConfig
    dtype: torch.dtype
    decoder: Decoder | EncoderDecoder
    slicer: AdapterSlicer | None = None


def load_model_part(
    config: EngineConfig, mapping: Mapping, collectives: Collectives, device: Device
) -> ModelPart:
    """Read this rank's weights. Raises ConfigError."""
    model = read_model_config(config.model_dir)
    dtype = compute_dtype(config.dtype, model, device)
    sizes = config.quant, config.max_seq_len
    decoder = load_rank(config.model_dir, model, dtype, device, mapping, collectives, *sizes)
    slicer = AdapterSlicer(model, mapping, config.lora.target_modules, collectives.least)
    return ModelPart(model, decoder.config, dtype, decoder, slicer)


def load_rank(
    model_dir: Path,
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    mapping: Mapping,
    collectives: Collectives,
    quant: QuantConfig | None = None,
    max_seq_len: int | None = None,
) -> RankDecoder | RankEncoderDecoder:
    """As `load_decoder`, for one rank."""
    local = rank_config(model, mapping)
    found, weights = load_weights(
        model_dir, model, dtype, device, quant, lambda plan: rank_plan(plan, model, mapping)
    )
    local = replace(local, tie_word_embeddings=found.tie_word_embeddings)
    _fill_ends(weights, local, dtype, device, mapping)
    _fill_biases(weights, local, dtype, device)
    common = local, model, weights, dtype, device.ops, mapping, collectives
    return RankDecoder(*common) if model.encoder is None else RankEncoderDecoder(*common, max_seq_len)


def _fill_ends(
    weights: dict[str, Any], local: ModelConfig, dtype: torch.dtype, device: Device, mapping: Mapping
) -> None:
    """Set a head that is tied to the embedding, and empty tensors for weights that this stage does not
    have.
    """
    empty = torch.empty((0, local.hidden_size), dtype=dtype, device=device.torch)
    if "head.weight" not in weights and mapping.is_last_stage and not local.bidirectional:
        weights["head.weight"] = tied_head(weights["embed"], device)
    for name in ("head.weight", "embed", *_around_stages(local)):
        weights.setdefault(name, empty)


def _around_stages(local: ModelConfig) -> list[str]:
    """Weights that only the first or only the last stage has."""
    others = range(0 if local.altup is None else local.altup.streams - 1)
    names = [f"altup.{end}.{n}.weight" for end in ("enter", "leave") for n in others]
    if local.layer_inputs is not None:
        names += ["layer_inputs.project.weight", "layer_inputs.norm.weight"]
    if local.projected_size:
        names += ["0.project_in.weight", "0.project_out.weight"]
    return names


def _fill_biases(weights: dict[str, Any], local: ModelConfig, dtype: torch.dtype, device: Device) -> None:
    """For experts whose outputs are summed, one rank has the bias, and the others add nothing."""
    moe = local.moe
    for layer in moe.layers if moe is not None and moe.biased else ():
        for expert in range(moe.num_experts if moe is not None else 0):
            nothing = torch.zeros(local.hidden_size, dtype=dtype, device=device.torch)
            weights.setdefault(f"{layer}.expert.{expert}.down.bias", nothing)
