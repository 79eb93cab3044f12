"""Memory traffic of a decode step: how much adapters must slow it down if memory bandwidth is the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manylora.bench.load import Sample
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.llmapi.lora import LoRARequest
from manylora.lora.formats.base_weights import BaseWeights
from manylora.lora.formats.read_options import ReadOptions
from manylora.lora.formats.sources import find_source, read_lora
from manylora.lora.modules import lora_modules
from manylora.lora.number_types import BY_DTYPE
from manylora.model.checkpoint import read_model_config


@dataclass(frozen=True)
class Traffic:
    """Bytes that an average decode step of a run reads: base weights, KV cache of the running sequences, and
    each adapter of the batch once. Activations do not count.
    """

    weight_bytes: float
    kv_bytes: float
    adapters_in_batch: float
    adapter_bytes: float  # of one adapter

    @property
    def ideal_ratio(self) -> float:
        """Decoding speed with these adapters / without, if memory bandwidth were the only limit."""
        base = self.weight_bytes + self.kv_bytes
        return base / (base + self.adapters_in_batch * self.adapter_bytes)


def mean_traffic(samples: Sequence[Sample], num_bytes: float) -> Traffic | None:
    """The mean over samples with running sequences. None if there are none. num_bytes: per adapter."""
    busy = [stats for _, stats in samples if stats.running]
    if not busy:
        return None
    kv_bytes = [(s.kv_blocks - s.kv_blocks_free) / s.kv_blocks * s.kv_bytes for s in busy]
    return Traffic(
        weight_bytes=busy[0].weight_bytes,
        kv_bytes=sum(kv_bytes) / len(busy),
        adapters_in_batch=sum(s.adapters.device_pinned for s in busy) / len(busy),
        adapter_bytes=num_bytes,
    )


def adapter_bytes(adapters: Sequence[LoRARequest], model_dir: Path, element_bytes: int) -> float:
    """The mean size of the adapters: A and B, DoRA magnitudes, and extras.

    element_bytes: of the cache's dtype; adapters of 8-bit floats have 1.
    """
    modules = lora_modules(read_model_config(model_dir))
    total = 0.0
    for adapter in adapters:
        assert adapter.lora_path is not None
        source = find_source(Path(adapter.lora_path))
        lora = read_lora(source, 0, ReadOptions(modules=modules, base=BaseWeights(model_dir)))
        assert lora.config is not None and lora.weights is not None
        encoding = BY_DTYPE[lora.weights.dtype].encoding
        size = element_bytes if encoding is Encoding.PLAIN else lora.weights.dtype.itemsize
        for module_id, layer, rank, *dora in lora.config[0].tolist():
            total += modules[module_id].at(layer).row_elements(RowFormat(rank, dora == [1])) * size
        total += sum(extra.values.size for extra in lora.extras) * element_bytes
    return total / len(adapters)
