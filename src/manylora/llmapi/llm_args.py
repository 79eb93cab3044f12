"""PeftCacheConfig and KvCacheConfig: the memory of one LLM, in the fields of TensorRT-LLM."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.llmapi.lora import LoraConfig, Options

__all__ = ["KvCacheConfig", "LoraConfig", "PeftCacheConfig"]

# Fields of KvCacheConfig that this engine has no counterpart of, and the values that ask for nothing.
KV_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "max_attention_window": (None,),
    "sink_token_length": (None, 0),
    "host_cache_size": (None, 0),
    "cross_kv_cache_fraction": (None,),
    "secondary_offload_min_priority": (None,),
    "event_buffer_max_size": (0,),
    "use_uvm": (False,),
    "dtype": ("auto", "fp8"),
}


@dataclass(frozen=True)
class PeftCacheConfig(Options):
    """Size of the two-level adapter cache. Sizes in bytes. Raises ValueError.

    num_host_module_layer, num_device_module_layer: > 0 sizes the level in rank-1 rows of the widest module,
    instead of bytes. device_cache_percent: a fraction in (0, 1] of the device memory left after weights and
    KV cache. max_adapter_size: rank that one adapter of which must fit each level; LoraConfig.max_lora_rank
    raises it. device_cache_size: bytes, instead of the fraction. disk_cache_dir: keeps copies of adapters, at
    most disk_cache_size bytes; None: no disk level. Workers, streams and pages per block have no effect here.
    """

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = LoraCacheConfig.optimal_adapter_size
    max_adapter_size: int = LoraCacheConfig.max_adapter_size
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float = 0.02
    host_cache_size: int = LoraCacheConfig.host_memory_bytes
    lora_prefetch_dir: str | None = None
    device_cache_size: int | None = None
    disk_cache_dir: str | Path | None = None
    disk_cache_size: int = LoraCacheConfig.disk_cache_bytes

    def __post_init__(self) -> None:
        if self.lora_prefetch_dir is not None:
            raise ValueError(
                f"lora_prefetch_dir was set to '{self.lora_prefetch_dir}' while LoRA prefetch "
                "is not supported"
            )
        if not 0 < self.device_cache_percent <= 1:
            raise ValueError(
                f"device_cache_percent is a fraction, in (0, 1], got {self.device_cache_percent}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name.endswith("_module_layer") or field.name == "disk_cache_size" else 1
            if isinstance(value, int) and value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class KvCacheConfig(Options):
    """Size and reuse of the KV cache. Raises ValueError.

    enable_block_reuse:       common prompt beginnings are computed once, per adapter.
    max_tokens:               upper bound of the cache, in tokens.
    free_gpu_memory_fraction: of the device memory left after the weights, in (0, 1].
    tokens_per_block:         tokens.
    dtype:                    auto, or fp8, which is QuantConfig's kv_cache_quant_algo FP8.
    Partial reuse and onboarding have no effect here. All others are refused when set.
    """

    enable_block_reuse: bool = EngineConfig.enable_kv_cache_reuse
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = EngineConfig.kv_cache_free_gpu_mem_fraction
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    dtype: str = "auto"
    tokens_per_block: int = EngineConfig.tokens_per_block

    def __post_init__(self) -> None:
        for name, neutral in KV_NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise ValueError(
                    f"KvCacheConfig: {name} is not supported, got {getattr(self, name)!r}; leave it out"
                )
        fraction = self.free_gpu_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"free_gpu_memory_fraction must be in (0, 1], got {fraction}")
