"""EngineConfig: what the user sets. Frozen."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from manylora.config.values import at_least, between, fraction, one_of
from manylora.errors import ConfigError
from manylora.quant.config import QuantConfig

GIB = 2**30
MAX_CHUNK = 512
MAX_DRAFT, MAX_NGRAM = 64, 16
POLICIES = ("guaranteed_no_evict", "max_utilization")
USUAL_FRACTIONS = (0.05, 0.02)  # defaults of TensorRT-LLM in Triton and in Python: nobody chose them
DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LoraCacheConfig:
    """The two-level adapter cache. Sizes follow TensorRT-LLM's PeftCacheConfig and its Triton parameters."""

    optimal_adapter_size: int = 8  # rank at which an adapter fills about one page
    max_adapter_size: int = 64  # a page must hold at least one module's row of this rank
    gpu_memory_fraction: float = 0.05  # device level: share of the memory left after weights and KV cache
    gpu_memory_bytes: int | None = None  # device level in bytes; overrides the fraction
    host_memory_bytes: int = GIB
    num_device_module_layer: int = 0  # > 0: device level in (layer, module) rows of rank 1; overrides bytes
    num_host_module_layer: int = 0
    max_loras: int | None = None  # device level: adapters at the rank limit, with every target module
    max_cpu_loras: int | None = None  # host level: the same. Each overrides the other sizes of its level
    max_lora_rank: int | None = None  # adapters of a larger rank are refused; None: max_adapter_size
    target_modules: tuple[str, ...] = ()  # names such as attn_q; empty: all modules of the model
    prefetch_dir: Path | None = None
    catalog_dir: Path | None = None  # adapters by name: <dir>/<name>/
    names_file: Path | None = None  # JSON file with further names and their folders
    allowed_paths: tuple[Path, ...] = ()  # further folders that links in these two may point to
    lora_adapter_dtype: str = "auto"  # auto: the checkpoint's if the kernels can read it, else `dtype`
    text_only: bool = False  # serve only the text part of a vision adapter; else it is refused
    disk_cache_dir: Path | None = None  # copies of adapters, by digest; None: no disk level
    disk_cache_bytes: int = 4 * GIB

    def __post_init__(self) -> None:
        ranks = ("optimal_adapter_size", "max_adapter_size", "max_lora_rank")
        at_least(1, self, *ranks, "max_loras", "max_cpu_loras")
        at_least(0, self, "gpu_memory_bytes", "host_memory_bytes", "disk_cache_bytes")
        at_least(0, self, "num_device_module_layer", "num_host_module_layer")
        fraction(lora_cache_gpu_memory_fraction=self.gpu_memory_fraction)
        one_of(DTYPES, lora_adapter_dtype=self.lora_adapter_dtype)

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders that may hold adapter files. Adapters sent with a request need none."""
        return (*filter(None, (self.prefetch_dir, self.catalog_dir)), *self.allowed_paths)

    @property
    def sizes_device(self) -> bool:
        """Whether the user chose a size for the device level."""
        fraction = self.gpu_memory_fraction not in USUAL_FRACTIONS
        return fraction or bool(self.gpu_memory_bytes or self.num_device_module_layer or self.max_loras)

    @property
    def sizes_host(self) -> bool:
        """Whether the user chose a size for the host level."""
        size = self.host_memory_bytes != LoraCacheConfig.host_memory_bytes
        return size or bool(self.num_host_module_layer or self.max_cpu_loras)

    @property
    def sizes_rows(self) -> bool:
        """Whether the user chose a size in adapters or in rows."""
        device, host = self.max_loras or self.num_device_module_layer, self.max_cpu_loras
        return bool(device or host or self.num_host_module_layer)

    @property
    def rank_limit(self) -> int:
        """The largest rank an adapter may have."""
        return self.max_adapter_size if self.max_lora_rank is None else self.max_lora_rank


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine. Raises ConfigError for a value that cannot work."""

    model_dir: Path
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto: the checkpoint's; float32 on a CPU without native support for it
    max_batch_size: int = 64  # sequences in one step; each beam counts as one
    max_beam_width: int = 1
    tokenizer_dir: Path | None = None  # for guided decoding; None: such requests are refused
    max_num_tokens: int = 2048  # tokens in one step
    max_seq_len: int | None = None  # prompt + output tokens; None: what the model allows
    tokens_per_block: int = 32
    kv_cache_free_gpu_mem_fraction: float = 0.9
    gpu_memory_utilization: float | None = None  # share of the device's memory for everything; None: no limit
    max_tokens_in_paged_kv_cache: int | None = None
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True
    batch_scheduler_policy: str = "guaranteed_no_evict"
    max_queue_size: int = 0  # waiting requests; 0: no limit
    quant: QuantConfig | None = None  # quantise the weights; None: leave them as stored
    stream_interval: int = 1  # new tokens per streamed event; the first is sent at once
    wrap_input_ids: bool = False  # wrap ids beyond the vocabulary (modulo) instead of refusing them
    enable_cuda_graph: bool | None = None  # replay decode steps as CUDA graphs; None: if supported
    cuda_graph_cache_size: int = 0  # number of graphs kept; 0: 128
    enable_overlap: bool | None = None  # schedule a step while the previous one runs; None: on a GPU
    tensor_parallel_size: int = 1  # ranks that share each layer
    pipeline_parallel_size: int = 1  # groups of such ranks, each with a part of the layers
    moe_expert_parallel_size: int = 1  # tensor-parallel ranks among which whole experts are divided
    max_draft_len: int = 0  # longest n-gram draft, in tokens; 0: no drafts
    max_matching_ngram_size: int = 4  # longest n-gram at a sequence's end to look up
    min_matching_ngram_size: int = 2  # shortest n-gram
    ngram_use_oldest: bool = True  # draft from the n-gram's first occurrence; False: its last
    max_draft_concurrency: int = 0  # no drafts with more running sequences than this; 0: no limit
    lora: LoraCacheConfig = field(default_factory=LoraCacheConfig)

    def __post_init__(self) -> None:
        at_least(1, self, "max_batch_size", "max_num_tokens", "max_beam_width", "max_seq_len")
        at_least(1, self, "tokens_per_block", "max_tokens_in_paged_kv_cache", "stream_interval")
        at_least(0, self, "max_queue_size", "cuda_graph_cache_size", "max_draft_concurrency")
        between(0, MAX_DRAFT, self, "max_draft_len")
        between(1, MAX_NGRAM, self, "max_matching_ngram_size", "min_matching_ngram_size")
        at_least(1, self, "tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size")
        fraction(kv_cache_free_gpu_mem_fraction=self.kv_cache_free_gpu_mem_fraction)
        if self.gpu_memory_utilization is not None:
            fraction(gpu_memory_utilization=self.gpu_memory_utilization)
        one_of(POLICIES, batch_scheduler_policy=self.batch_scheduler_policy)
        one_of(DTYPES, dtype=self.dtype)
        if self.max_beam_width > self.max_batch_size:
            raise ConfigError(
                f"max_beam_width must be at most max_batch_size ({self.max_batch_size}), "
                f"got {self.max_beam_width}"
            )
        if self.max_num_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_num_tokens must be at least max_batch_size ({self.max_batch_size}), "
                f"got {self.max_num_tokens}"
            )

    @property
    def sizes_kv(self) -> bool:
        """Whether the user chose a size for the KV cache."""
        fraction = self.kv_cache_free_gpu_mem_fraction != EngineConfig.kv_cache_free_gpu_mem_fraction
        return fraction or bool(self.gpu_memory_utilization or self.max_tokens_in_paged_kv_cache)

    @property
    def world_size(self) -> int:
        """Ranks: the processes that compute one model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def chunk_tokens(self) -> int:
        """Where a prompt that does not fit one step is split: at multiples of this, a power of two.

        A prompt's chunks therefore do not depend on the other sequences in a step. One chunk always fits a
        step beside all other sequences.
        """
        fits = self.max_num_tokens - self.max_batch_size + 1
        return 1 << min(MAX_CHUNK, fits).bit_length() - 1

    @property
    def max_decode_rows(self) -> int:
        """Rows of a decode step: one per sequence, plus the draft tokens."""
        drafted = max(self.max_draft_len, self.max_batch_size) if self.max_draft_len else 0
        return min(self.max_num_tokens, self.max_batch_size + drafted)
