"""The table of the engine's settings: each field of these frozen classes is a row (`config.settings`); and
`resolve`, the only way to an EngineConfig: the user's settings, else the build record, else defaults.
"""

# ruff: noqa: RUF009 - `setting` makes a dataclass field, nothing that instances would share.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.settings import Setting, check, read_json, rows, setting
from manylora.errors import ConfigError

KEY = "build_config"
LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens", "max_beam_width")
QKV_GROUPS = (("attn_q", "attn_k", "attn_v"), ("cross_attn_q", "cross_attn_k", "cross_attn_v"))
GIB = 2**30
MAX_CHUNK = 512
MAX_DRAFT, MAX_NGRAM = 64, 16
USUAL_FRACTIONS = (0.05, 0.02)  # defaults of TensorRT-LLM in Triton and in Python: nobody chose them
DTYPES = ("auto", "float32", "float16", "bfloat16")
FRACTION = MappingProxyType({"above": 0, "most": 1})
INVERTED = {True: False, False: None}  # a flag that disables: false leaves the default

# fmt: off


@dataclass(frozen=True)
class LoraCacheConfig:
    """The two-level adapter cache. Sizes follow TensorRT-LLM's PeftCacheConfig and its Triton parameters."""

    optimal_adapter_size: int = setting(
        8, "rank at which an adapter fills about one page", least=1, triton="lora_cache_optimal_adapter_size",
        llm="peft_cache_config.optimal_adapter_size")
    max_adapter_size: int = setting(
        64, "a page holds at least one module's row of this rank", least=1,
        triton="lora_cache_max_adapter_size", llm="peft_cache_config.max_adapter_size")
    gpu_memory_fraction: float = setting(
        0.05, "device level: share of the memory left after weights and KV cache", **FRACTION,
        named="lora_cache_gpu_memory_fraction", triton="lora_cache_gpu_memory_fraction",
        llm="peft_cache_config.device_cache_percent")
    gpu_memory_bytes: int | None = setting(
        None, "device level in bytes, instead of the fraction", least=0, triton="lora_cache_gpu_memory_bytes",
        llm="peft_cache_config.device_cache_size")
    host_memory_bytes: int = setting(
        GIB, "host level in bytes", least=0, triton="lora_cache_host_memory_bytes",
        llm="peft_cache_config.host_cache_size")
    num_device_module_layer: int = setting(
        0, "device level in rows of rank 1, one per layer and module, instead of bytes; 0: bytes", least=0,
        triton="lora_cache_num_device_module_layer", llm="peft_cache_config.num_device_module_layer")
    num_host_module_layer: int = setting(
        0, "host level in such rows", least=0, triton="lora_cache_num_host_module_layer",
        llm="peft_cache_config.num_host_module_layer")
    max_loras: int | None = setting(
        None, "number of adapters at the rank limit, with every target module, that fit on the device",
        least=1, llm="lora_config.max_loras", serve="max_loras")
    max_cpu_loras: int | None = setting(
        None, "number of such adapters in host memory", least=1, llm="lora_config.max_cpu_loras",
        serve="max_cpu_loras")
    max_lora_rank: int | None = setting(
        None, "maximum rank of an adapter", least=1,
        llm="lora_config.max_lora_rank", serve="max_lora_rank", build="max_lora_rank")
    target_modules: tuple[str, ...] = setting(
        (), "modules with adapters, such as attn_q; default: all modules of the model",
        triton="lora_target_modules", llm="lora_config.lora_target_modules", build="lora_target_modules")
    prefetch_dir: Path | None = setting(
        None, "folder with adapters to load at startup: <dir>/<task id>/", triton="lora_prefetch_dir")
    catalog_dir: Path | None = setting(
        None, "folder with adapters by name: <dir>/<name>/", triton="lora_catalog_dir")
    names_file: Path | None = setting(
        None, "JSON file with further names and their folders", triton="lora_names_file")
    allowed_paths: tuple[Path, ...] = setting(
        (), "further folders that links in these two may lead to", triton="lora_allowed_path")
    lora_adapter_dtype: str = setting(
        "auto", "dtype of adapters in memory; auto: the checkpoint's if the kernels can read it",
        choices=DTYPES, llm="lora_config.lora_adapter_dtype", serve="lora_dtype")
    text_only: bool = setting(
        False, "serve only the text part of a vision model's adapter; otherwise it is refused",
        triton="lora_text_only", llm="lora_config.lora_text_only")
    disk_cache_dir: Path | None = setting(
        None, "folder for copies of adapters; default: no disk level", triton="lora_disk_cache_dir",
        llm="peft_cache_config.disk_cache_dir")
    disk_cache_bytes: int = setting(
        4 * GIB, "maximum size of these copies", least=0, triton="lora_disk_cache_bytes",
        llm="peft_cache_config.disk_cache_size")

    def __post_init__(self) -> None:
        check(self)

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
    device: str = setting("auto", "auto, cpu, cuda, cuda:N", llm="device", serve="device", bench="device")
    dtype: str = setting(
        "auto", "auto, float32, float16, bfloat16", choices=DTYPES, llm="dtype", serve="dtype",
        serve_values={"half": "float16", "float": "float32"}, bench="dtype", build="dtype")
    max_batch_size: int = setting(
        64, "maximum number of sequences in one step; each beam counts as one", least=1,
        triton="max_num_sequences", llm="max_batch_size", serve="max_batch_size max_num_seqs",
        bench="max_batch_size", build="max_batch_size")
    max_beam_width: int = setting(
        1, "maximum number of beams of one request", least=1, llm="max_beam_width", serve="max_beam_width",
        build="max_beam_width")
    tokenizer_dir: Path | None = setting(
        None, "tokenizer that guides are compiled for; default: requests with a guide are refused")
    max_num_tokens: int = setting(
        2048, "maximum number of tokens in one step, at least max_batch_size", least=1, llm="max_num_tokens",
        serve="max_num_tokens max_num_batched_tokens", bench="max_num_tokens", build="max_num_tokens")
    max_seq_len: int | None = setting(
        None, "maximum tokens of prompt and output together; default: the model's", least=1,
        llm="max_seq_len", serve="max_seq_len max_model_len", bench="max_seq_len",
        build="max_seq_len max_decoder_seq_len")
    tokens_per_block: int = setting(
        32, "tokens in a block of the KV cache", least=1, llm="kv_cache_config.tokens_per_block",
        serve="block_size")
    kv_cache_free_gpu_mem_fraction: float = setting(
        0.9, "KV cache: share of the memory left after the weights", **FRACTION,
        llm="kv_cache_config.free_gpu_memory_fraction", serve="kv_cache_free_gpu_memory_fraction",
        bench="kv_cache_free_gpu_mem_fraction")
    gpu_memory_utilization: float | None = setting(
        None, "share of the device's memory for weights, KV cache and adapters", **FRACTION,
        llm="gpu_memory_utilization", serve="gpu_memory_utilization")
    max_tokens_in_paged_kv_cache: int | None = setting(
        None, "maximum size of the KV cache in tokens", least=1, llm="kv_cache_config.max_tokens")
    kv_cache_host_memory_bytes: int = setting(
        0, "host memory for KV blocks that the device has no room for, in bytes; 0: none", least=0,
        llm="kv_cache_config.host_cache_size", serve="kv_cache_host_memory_bytes")
    kv_disk_cache_dir: Path | None = setting(
        None, "folder for KV blocks, which survive a restart there; default: none",
        llm="kv_cache_config.disk_cache_path", serve="kv_disk_cache_dir")
    kv_disk_cache_bytes: int = setting(
        4 * GIB, "maximum size of these blocks on disk", least=0,
        llm="kv_cache_config.disk_cache_size", serve="kv_disk_cache_bytes")
    secondary_offload_min_priority: int | None = setting(
        None, "priority that KV blocks need to go there", least=0, most=100,
        llm="kv_cache_config.secondary_offload_min_priority")
    enable_kv_cache_reuse: bool = setting(
        True, "share KV blocks of equal prompt prefixes", llm="kv_cache_config.enable_block_reuse",
        serve="enable_prefix_caching")
    enable_chunked_context: bool = setting(
        True, "process long prompts in chunks", llm="enable_chunked_prefill", serve="enable_chunked_prefill",
        bench="enable_chunked_context")
    batch_scheduler_policy: str = setting(
        "guaranteed_no_evict", "guaranteed_no_evict or max_utilization",
        choices=("guaranteed_no_evict", "max_utilization"), llm="batch_scheduler_policy",
        serve="batch_scheduler_policy", bench="scheduler_policy")
    max_queue_size: int = setting(
        0, "maximum number of waiting requests; 0: no limit", least=0, llm="max_queue_size")
    quant: QuantConfig | None = None  # quantise the weights; None: leave them as stored
    stream_interval: int = setting(
        1, "new tokens per streamed event; the first is sent at once", least=1, llm="stream_interval",
        serve="stream_interval")
    wrap_input_ids: bool = setting(
        False, "take ids beyond the vocabulary modulo its size instead of refusing them",
        llm="wrap_input_ids")
    enable_cuda_graph: bool | None = setting(
        None, "replay decode steps as CUDA graphs; --enforce-eager: do not", triton="cuda_graph_mode",
        llm="enable_cuda_graph", serve="enforce_eager", serve_values=INVERTED)
    cuda_graph_cache_size: int = setting(
        0, "number of CUDA graphs kept; 0: 128", least=0, llm="cuda_graph_cache_size")
    enable_overlap: bool | None = setting(
        None, "schedule a step while the previous one runs; default: on a GPU",
        llm="disable_overlap_scheduler", llm_values=INVERTED)
    tensor_parallel_size: int = setting(
        1, "number of ranks that share each layer", least=1, llm="tensor_parallel_size",
        serve="tensor_parallel_size tp_size", bench="tp", build="tp_size")
    pipeline_parallel_size: int = setting(
        1, "number of pipeline stages, each with a part of the layers", least=1, llm="pipeline_parallel_size",
        serve="pipeline_parallel_size pp_size", bench="pp", build="pp_size")
    moe_expert_parallel_size: int = setting(
        1, "number of groups of ranks among which whole experts are divided", least=1,
        llm="moe_expert_parallel_size", serve="ep_size", bench="ep")
    max_draft_len: int = setting(
        0, "maximum length of an n-gram draft in tokens; 0: no drafts", least=0, most=MAX_DRAFT,
        llm="speculative_config.max_draft_len", bench="max_draft_len")
    max_matching_ngram_size: int = setting(
        4, "longest n-gram at a sequence's end that is looked up", least=1, most=MAX_NGRAM,
        llm="speculative_config.max_matching_ngram_size")
    min_matching_ngram_size: int = setting(
        2, "shortest such n-gram", least=1, most=MAX_NGRAM, llm="speculative_config.min_matching_ngram_size")
    ngram_use_oldest: bool = setting(
        True, "draft what followed the n-gram's first occurrence; false: its last",
        llm="speculative_config.is_use_oldest")
    max_draft_concurrency: int = setting(
        0, "no drafts with more running sequences than this; 0: no limit", least=0,
        llm="speculative_config.max_concurrency")
    lora: LoraCacheConfig = field(default_factory=LoraCacheConfig)

    def __post_init__(self) -> None:
        check(self)
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
        """A prompt that does not fit one step is split at multiples of this, whatever else the step has."""
        fits = self.max_num_tokens - self.max_batch_size + 1
        return 1 << min(MAX_CHUNK, fits).bit_length() - 1

    @property
    def max_decode_rows(self) -> int:
        """Rows of a decode step: one per sequence, plus the draft tokens."""
        drafted = max(self.max_draft_len, self.max_batch_size) if self.max_draft_len else 0
        return min(self.max_num_tokens, self.max_batch_size + drafted)


QUANT_SETTINGS = (
    Setting(
        "quantise the weights: W8A16, W4A16, FP8; on a CPU also W8A8, W4A8", name="quant_algo",
        llm="quant_config.quant_algo", serve="quantization", serve_values={"fp8": "FP8"}, build="quant_algo"),
    Setting(
        "FP8: keys and values as 8-bit floats", name="kv_cache_quant_algo",
        llm="quant_config.kv_cache_quant_algo", build="kv_cache_quant_algo"),
    Setting(
        "W4A16: number of inputs that share a scale", QuantConfig.group_size, "group_size", "int",
        triton="quant_group_size", llm="quant_config.group_size", build="group_size"),
    Setting(
        "patterns of linear layers that are not quantised", name="exclude_modules", type="list[str]",
        triton="quant_exclude_modules", llm="quant_config.exclude_modules", build="exclude_modules"),
    Setting(
        "auto, or fp8", name="kv_cache_quant_algo", triton=None, llm="kv_cache_config.dtype",
        llm_values={"fp8": "FP8", "auto": None}, serve="kv_cache_dtype",
        serve_values={"fp8_e4m3": "fp8", "bfloat16": "auto", "float16": "auto"}),
)
# fmt: on

SETTINGS = (*rows(EngineConfig).values(), *rows(LoraCacheConfig).values(), *QUANT_SETTINGS)
"""Every row. If two rows set one setting, the last wins."""
Settings = Mapping[str, Any]
"""Values by the names of the rows of SETTINGS. A missing name was not set."""

QUANT_KEYS = tuple(dict.fromkeys(row.name for row in QUANT_SETTINGS))
NOTHING: Settings = MappingProxyType({})


@dataclass(frozen=True)
class BuildRecord:
    """What `manylora build` recorded. settings: of `resolve`. lora: fields of a LoraConfig."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    quant_algo: str | None = None
    lora: Mapping[str, Any] = field(default_factory=dict)
    tp_size: int = 1
    pp_size: int = 1


def weights_algo(model_dir: Path, quant: QuantConfig | None) -> str | None:
    """The quant_algo of a model's weights, requested or recorded; None: neither. Raises ConfigError."""
    asked = quant.quant_algo if quant is not None and quant.any_weights else None
    return asked or read_build_record(model_dir).quant_algo


def read_build_record(model_dir: Path) -> BuildRecord:
    """Empty for a directory that was not built, or does not exist. Raises ConfigError."""
    path = Path(model_dir) / "config.json"
    raw = read_json(path) or {}
    record = raw.get(KEY)
    if record is None:
        return BuildRecord()
    try:
        lora = record.get("lora_config") or {}
        quantization = raw["pretrained_config"]["quantization"]
        mapping = raw["pretrained_config"].get("mapping", {})
        tp_size, pp_size = int(mapping.get("tp_size", 1)), int(mapping.get("pp_size", 1))
        found = {name: record.get(name) for name in LIMITS} | {"max_lora_rank": lora.get("max_lora_rank")}
        found = {name: int(limit) for name, limit in found.items() if limit is not None}
        if lora.get("lora_target_modules"):
            found["target_modules"] = tuple(lora["lora_target_modules"])
        if quantization["kv_cache_quant_algo"] is not None:
            found["kv_cache_quant_algo"] = quantization["kv_cache_quant_algo"]
        if tp_size * pp_size > 1:
            found |= {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
        return BuildRecord(found, quantization["quant_algo"], lora, tp_size, pp_size)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {KEY} is not what manylora build writes ({error}); build it again"
        ) from error


def rename(given: Mapping[str, Any], names: Mapping[str, Setting], what: str = "") -> dict[str, Any]:
    """Translate a door's settings, as text or from YAML, to `resolve`'s. what: prefix in errors. Raises
    ConfigError.
    """
    settings: dict[str, Any] = {}
    for name, row in names.items():
        if given.get(name) is None:
            continue
        try:
            settings[row.name] = row.convert(given[name])
        except ValueError as error:
            raise ConfigError(f"{what}{name} {error}") from error
    return settings


def resolve(model_dir: Path, settings: Settings, defaults: Settings = NOTHING) -> EngineConfig:
    """Each setting comes from `settings`, else the build record, else `defaults`, else the field's default.

    max_beam_width None means max_batch_size. Unless set, max_num_tokens is raised to max_batch_size, and
    max_adapter_size to max_lora_rank. Raises ConfigError, also if a setting exceeds what model_dir was built
    for.
    """
    settings = {name: value for name, value in settings.items() if value not in (None, ())}
    recorded = read_build_record(model_dir).settings
    found = {**defaults, **recorded, **settings}
    for name in (*LIMITS, "max_lora_rank"):
        asked, built = settings.get(name), recorded.get(name)
        if asked is not None and built is not None and asked > built:
            raise ConfigError(
                f"{name} ({asked}) is larger than the directory was built for ({built}): lower it, or build "
                f"again with --{name} {asked}"
            )
    if "target_modules" in settings:
        modules = recorded.get("target_modules")  # None: all
        if modules is not None:
            wrong = [name for name in settings["target_modules"] if name not in modules]
            if wrong:
                raise ConfigError(
                    f"lora_target_modules: {wrong[0]} is not among those the directory was built for "
                    f"({', '.join(modules)}); build again with it"
                )
        targets = with_whole_qkv(settings["target_modules"])
        found["target_modules"] = tuple(name for name in targets if modules is None or name in modules)
    batch = found.setdefault("max_batch_size", EngineConfig.max_batch_size)
    found.setdefault("max_num_tokens", max(EngineConfig.max_num_tokens, batch))
    if found.get("max_beam_width", EngineConfig.max_beam_width) is None:
        found["max_beam_width"] = batch
    largest = found.get("max_adapter_size", LoraCacheConfig.max_adapter_size)
    rank = found.setdefault("max_lora_rank", largest)
    found["max_adapter_size"] = max(largest, rank)
    return EngineConfig(
        model_dir,
        quant=quant_settings(found),
        lora=LoraCacheConfig(**{name: found[name] for name in rows(LoraCacheConfig) if name in found}),
        **{name: found[name] for name in rows(EngineConfig) if name in found},
    )


def quant_settings(settings: Settings) -> QuantConfig | None:
    """None: keep weights and KV cache as in the model directory. Raises ConfigError."""
    found = {name: settings[name] for name in QUANT_KEYS if name in settings}
    try:
        return QuantConfig(**found) if found else None
    except ValueError as error:
        raise ConfigError(f"parameters of quantisation: {error}") from error


def with_whole_qkv(targets: tuple[str, ...]) -> tuple[str, ...]:
    """targets, completed to whole q, k, v groups where they name only a part of one."""
    missing = [
        name for group in QKV_GROUPS if set(group) & set(targets) for name in group if name not in targets
    ]
    return (*targets, *missing)
