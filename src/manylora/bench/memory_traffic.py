"""The ideal ratio: how much slower adapters must make decoding, by the bytes that a step has to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manylora.bench.load import Sample
from manylora.llmapi.lora import LoRARequest
from manylora.lora.float8 import is_float8
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import lora_modules
from manylora.model.checkpoint import read_model_config

__all__ = ["Traffic", "adapter_bytes", "mean_traffic"]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one mean step of a run reads: the base's weights, the keys and values of what runs, and each
    adapter in the batch once. Activations are left out."""

    weight_bytes: float
    kv_bytes: float
    adapters_in_batch: float
    adapter_bytes: float  # of one

    @property
    def ideal_ratio(self) -> float:
        """Decoding speed with these adapters / without, were it bound by memory bandwidth alone."""
        base = self.weight_bytes + self.kv_bytes
        return base / (base + self.adapters_in_batch * self.adapter_bytes)


def mean_traffic(samples: Sequence[Sample], num_bytes: float) -> Traffic | None:
    """Over the samples in which something ran; None when there are none."""
    busy = [stats for _, stats in samples if stats.running]
    if not busy:
        return None
    held = [(s.kv_blocks - s.kv_blocks_free) / s.kv_blocks * s.kv_bytes for s in busy]
    return Traffic(
        weight_bytes=busy[0].weight_bytes,
        kv_bytes=sum(held) / len(busy),
        adapters_in_batch=sum(s.adapters.device_pinned for s in busy) / len(busy),
        adapter_bytes=num_bytes,
    )


def adapter_bytes(adapters: Sequence[LoRARequest], model_dir: Path, element_bytes: int) -> float:
    """Of A and B, and of the magnitude with DoRA, in the mean of the adapters.

    element_bytes: of the cache's type; adapters of 8-bit floats keep theirs.
    """
    modules = lora_modules(read_model_config(model_dir))
    total = 0.0
    for adapter in adapters:
        assert adapter.lora_path is not None
        source = find_source(Path(adapter.lora_path))
        lora = read_lora(source, 0, modules=modules, base=BaseWeights(model_dir))
        assert lora.config is not None and lora.weights is not None
        size = 1 if is_float8(lora.weights.dtype) else element_bytes
        for module_id, _, rank, *dora in lora.config[0].tolist():
            total += modules[module_id].row_elements(rank, bool(dora and dora[0])) * size
        total += sum(extra.values.size for extra in lora.extras) * element_bytes
    return total / len(adapters)
