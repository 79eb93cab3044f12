"""The configs of an LLM, with TensorRT-LLM's fields, and LoRARequest: the adapter of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from manylora.adapters.modules import MODULE_NAMES
from manylora.adapters.remote.resolver import is_remote
from manylora.config.engine import EngineConfig, LoraCacheConfig, with_whole_qkv
from manylora.config.foreign import KV_CACHE_CONFIG
from manylora.request import LoraInput, LoraMix, mix

SOURCES = ("hf", "nemo")
MAX_ID = 2**64 - 1


class Options:
    """Records which fields were set (`dataclasses.replace` sets all): only these override a build record."""

    given: frozenset[str]

    def __new__(cls, *values: Any, **named: Any) -> Options:
        made = super().__new__(cls)
        names = [one.name for one in fields(cls)][: len(values)]  # type: ignore[arg-type]
        object.__setattr__(made, "given", frozenset([*names, *named]))
        return made


@dataclass(frozen=True)
class LoraConfig(Options):
    """Settings for the adapters of one LLM. Raises ValueError for wrong values.

    lora_dir: adapter directories from which target modules are inferred if none are named. lora_ckpt_source:
    "hf" (PEFT directories) or "nemo". max_lora_rank: adapters of a larger rank are refused.
    lora_target_modules: names such as attn_q; adapters with others are refused. Empty: inferred, or else all.
    trtllm_modules_to_hf_modules: module name -> its name or names in the checkpoint. Empty: the usual ones.
    max_loras, max_cpu_loras: capacity of the device and host caches, in adapters of the largest rank with
    every target module. None: the sizes of PeftCacheConfig. swap_gate_up_proj_lora_b_weight: adapters have
    the gate first in fused rows, as PEFT writes them; False: up. lora_adapter_dtype: dtype in memory: auto,
    float32, bfloat16 or float16. lora_text_only: serve the text part of a vision model's adapter; otherwise
    it is refused. The last two have no effect.
    """

    lora_dir: list[str] = field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = field(default_factory=list)
    trtllm_modules_to_hf_modules: Mapping[str, str | list[str]] = field(default_factory=dict)
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    swap_gate_up_proj_lora_b_weight: bool = True
    lora_adapter_dtype: str = "auto"
    lora_text_only: bool = False
    overlap_lora_and_base: bool = False
    cuda_graph_specialize_lora: bool = False

    def __post_init__(self) -> None:
        if self.lora_ckpt_source not in SOURCES:
            raise ValueError(f"lora_ckpt_source must be one of 'hf' or 'nemo', got {self.lora_ckpt_source}")
        for name in ("lora_dir", "lora_target_modules"):
            if isinstance(getattr(self, name), str | Path):
                raise ValueError(f"{name} must be a list, got {getattr(self, name)!r}")
        for name in (*self.lora_target_modules, *self.trtllm_modules_to_hf_modules):
            if name not in MODULE_NAMES:
                raise ValueError(f"Invalid LoRA module {name}")
        for name in ("max_lora_rank", "max_loras", "max_cpu_loras"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def missing_qkv_modules(self) -> list[str]:
        """q, k and v modules that are not named although another of their group is. They are served, too."""
        targets = tuple(self.lora_target_modules)
        return list(with_whole_qkv(targets)[len(targets) :])


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its id, and the path to read it from. Raises ValueError.

    lora_int_id: 0 to 2**64 - 1; identifies the adapter for the lifetime of the LLM.
    lora_path: a PEFT directory, a directory with the two converted .npy files, or a hub id org/name or a URL
        (s3, gs, https, oci, hf), which is downloaded at its first use. None: as earlier for this id, or the
        tensors of `LLM.load_adapter`.
    lora_version: keep: the request uses one version of the adapter; follow: it switches to newer ones.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | None = ""
    lora_ckpt_source: str = "hf"
    lora_version: str = "keep"

    def __post_init__(self) -> None:
        path = self.lora_path
        if path is not None and (not str(path) or not (Path(path).exists() or is_remote(path))):
            raise ValueError(f"lora_path ({path}) does not exist.")
        if self.lora_ckpt_source not in SOURCES:
            raise ValueError(f"lora_ckpt_source must be 'hf' or 'nemo', got '{self.lora_ckpt_source}'")
        if self.lora_version not in ("keep", "follow"):
            raise ValueError(f"lora_version must be 'keep' or 'follow', got {self.lora_version!r}")
        if not isinstance(self.lora_int_id, int) or not 0 <= self.lora_int_id <= MAX_ID:
            raise ValueError(f"lora_int_id must be an unsigned 64-bit integer, got {self.lora_int_id!r}")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str | None:
        return self.lora_path

    @property
    def ckpt_source(self) -> str:
        return self.lora_ckpt_source


LoRAChoice = LoRARequest | tuple[LoRARequest, float] | Sequence[tuple[LoRARequest, float]]
"""An adapter, an adapter with a scale, or several adapters that act together, each with its scale."""


def is_choice(given: object) -> bool:
    """Whether this is a single choice, rather than a list with one per prompt."""
    if isinstance(given, list | tuple):
        return _is_scaled(given) or (bool(given) and all(map(_is_scaled, given)))
    return given is None or isinstance(given, LoRARequest)


def members_of(given: LoRAChoice | None) -> list[tuple[LoRARequest, float]]:
    """The adapters, each with its scale. Raises ValueError."""
    if not is_choice(given):
        raise ValueError(
            "lora_request must be a LoRARequest, or (LoRARequest, scale), or a list of these pairs, "
            f"got {str(given)[:200]}"
        )
    if given is None or isinstance(given, LoRARequest):
        return [] if given is None else [(given, 1.0)]
    pairs: Any = [given] if _is_scaled(given) else given
    return [(one, float(scale)) for one, scale in pairs]


def lora_of(given: LoRAChoice | None, follow: bool = False) -> LoraInput | LoraMix | None:
    """By id, as the engine gets them. follow: to newer versions if asked. Raises RequestError, ValueError."""
    adapters = [
        (LoraInput(one.lora_int_id, follow=follow and one.lora_version == "follow"), scale)
        for one, scale in members_of(given)
    ]
    return mix(adapters, "lora_request")


def _is_scaled(given: object) -> bool:
    if not isinstance(given, list | tuple) or len(given) != 2 or not isinstance(given[0], LoRARequest):
        return False
    return isinstance(given[1], int | float) and not isinstance(given[1], bool)


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
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            least = 0 if name.endswith("_module_layer") or name == "disk_cache_size" else 1
            if isinstance(value, int) and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


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
    """Drafts from n-grams of the sequence (prompt lookup), which the model verifies. Raises ValueError.

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
