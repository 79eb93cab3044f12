"""PeftCacheConfig, KvCacheConfig and NGramDecodingConfig: configs with TensorRT-LLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.config.foreign import KV_CACHE_CONFIG
from manylora.doors.python.lora import LoraConfig, Options

__all__ = ["KvCacheConfig", "LoraConfig", "NGramDecodingConfig", "PeftCacheConfig"]

# vLLM's names for fields of NGramDecodingConfig, and the values that mean n-grams.
VLLM_FIELDS = {
    "num_speculative_tokens": "max_draft_len",
    "prompt_lookup_max": "max_matching_ngram_size",
    "prompt_lookup_min": "min_matching_ngram_size",
    "disable_by_batch_size": "max_concurrency",
}
NGRAM_METHODS = ("ngram", "[ngram]", "NGram")


@dataclass(frozen=True)
class PeftCacheConfig(Options):
    """Size of the two-level adapter cache. Sizes in bytes. Raises ValueError.

    num_host_module_layer, num_device_module_layer: if > 0, size in rank-1 rows of the widest module, instead
    of bytes. device_cache_percent: fraction in (0, 1] of the memory left after weights and KV cache.
    device_cache_size: bytes, instead of the fraction. max_adapter_size: each level must hold an adapter of
    this rank; LoraConfig.max_lora_rank raises it. disk_cache_dir: stores copies of adapters, up to
    disk_cache_size; None: no disk level. Workers, streams and pages per block have no effect here.
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

    enable_block_reuse: compute common prompt prefixes once per adapter. max_tokens: upper bound in tokens.
    free_gpu_memory_fraction: of the device memory left after the weights, in (0, 1]. dtype: auto, or fp8,
    which equals QuantConfig's kv_cache_quant_algo FP8. host_cache_size: bytes of host memory for blocks that
    the device has no room for. disk_cache_path, disk_cache_size: a folder for blocks, which survive a restart
    there, and its limit in bytes. secondary_offload_min_priority: that blocks need to go there. Partial reuse
    and onboarding have no effect here. All other fields are refused if set.
    """

    enable_block_reuse: bool = EngineConfig.enable_kv_cache_reuse
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = EngineConfig.kv_cache_free_gpu_mem_fraction
    host_cache_size: int | None = None
    disk_cache_size: int | None = None
    disk_cache_path: str | Path | None = None
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
        for name in KV_CACHE_CONFIG:
            if not KV_CACHE_CONFIG.allows(name, getattr(self, name)):
                raise ValueError(
                    f"KvCacheConfig: {name} is not supported, got {getattr(self, name)!r}; leave it out"
                )
        if self.disk_cache_size is not None and self.disk_cache_path is None:
            raise ValueError("KvCacheConfig: disk_cache_size needs disk_cache_path, the folder")
        fraction = self.free_gpu_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise ValueError(f"free_gpu_memory_fraction must be in (0, 1], got {fraction}")


@dataclass(frozen=True)
class NGramDecodingConfig(Options):
    """Drafts from n-grams in a sequence's own tokens (prompt lookup), which the model verifies. Raises
    ValueError.

    max_draft_len: 1 to 64 tokens; required. max_matching_ngram_size: longest n-gram at the sequence's end to
    look up; shorter ones are tried next, down to min_matching_ngram_size. is_use_oldest: draft what followed
    the first occurrence; False: the last. max_concurrency: do not draft with more running sequences; None: no
    limit. is_keep_all, is_public_pool: only True and False; tokens of other requests are never used.
    """

    max_draft_len: int = 0
    max_matching_ngram_size: int = EngineConfig.max_matching_ngram_size
    min_matching_ngram_size: int = EngineConfig.min_matching_ngram_size
    is_keep_all: bool = True
    is_use_oldest: bool = EngineConfig.ngram_use_oldest
    is_public_pool: bool = False
    max_concurrency: int | None = None
    decoding_type: str = "NGram"

    def __post_init__(self) -> None:
        if self.decoding_type != "NGram":
            raise ValueError(
                f"decoding_type must be NGram, got {self.decoding_type!r}: others have no drafter here"
            )
        if self.is_public_pool:
            raise ValueError(
                "is_public_pool must be False: a shared pool would draft one tenant's text for another"
            )
        if not self.is_keep_all:
            raise ValueError("is_keep_all must be True: a sequence's own tokens are the pool")
        if not isinstance(self.max_draft_len, int) or self.max_draft_len < 1:
            raise ValueError(f"max_draft_len must be given, at least 1, got {self.max_draft_len!r}")

    @classmethod
    def named(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields by their names here, also from vLLM's speculative_config. Raises ValueError."""
        found = {VLLM_FIELDS.get(name, name): value for name, value in given.items()}
        method, model = found.pop("method", None), found.pop("model", None)
        for name, value in (("method", method), ("model", model)):
            if value is not None and value not in NGRAM_METHODS:
                raise ValueError(f"{name} must be ngram, got {value!r}: others have no drafter here")
        return found
