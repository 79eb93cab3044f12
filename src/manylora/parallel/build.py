"""build_rank: the parts of a model that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from manylora.config.engine import EngineConfig, ModelConfig
from manylora.kernels.device import Device
from manylora.model.decoder import Decoder
from manylora.parallel.adapters import AdapterSlicer
from manylora.parallel.collectives import Collectives
from manylora.parallel.mapping import Mapping


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
    raise NotImplementedError
