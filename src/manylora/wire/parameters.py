"""Model parameters of config.pbtxt to an EngineConfig. Empty and unfilled `${…}` mean: the default."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manylora.config.build_record import BuildConfig, read_build_config
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.errors import ConfigError
from manylora.quant.config import QuantConfig

__all__ = [
    "engine_config", "flag", "logits_dtype", "milliseconds", "parameters_of", "positions", "quant_config",
    "value_of",
]  # fmt: skip

TYPES = ("v1", "V1", "inflight_batching", "inflight_fused_batching")
TRUE, FALSE = ("true", "1", "t", "y", "yes"), ("false", "0", "f", "n", "no")
# Parameters that would change answers; only these values mean what the engine does anyway.
HARMLESS = {
    "sink_token_length": ("0",),
    "decoding_mode": ("top_k", "top_p", "top_k_top_p", "beam_search", "auto"),
    "encoder_model_path": (),
    "guided_decoding_backend": ("xgrammar", "llguidance"),
}
POSITIONS = ("max_position_embeddings", "n_positions")  # what config.json calls the longest sequence


def parameters_of(model_config: str) -> dict[str, str]:
    """Of the JSON that Triton hands to a model as its configuration."""
    return {key: value["string_value"] for key, value in json.loads(model_config)["parameters"].items()}


def value_of(parameters: Mapping[str, str], name: str) -> str | None:
    """The parameter's text, or None when it is unset."""
    text = parameters.get(name, "").strip()
    return None if not text or text.startswith("${") else text


def flag(parameters: Mapping[str, str], name: str, default: bool) -> bool:
    text = value_of(parameters, name)
    if text is None:
        return default
    if text.lower() not in TRUE + FALSE:
        raise ConfigError(f"parameter {name} must be true or false, got {text!r}")
    return text.lower() in TRUE


def milliseconds(parameters: Mapping[str, str], name: str, default: int) -> float:
    """A period in seconds."""
    return _parse(name, value_of(parameters, name) or str(default), int) / 1000


def logits_dtype(model_config: Mapping[str, Any]) -> str:
    """NumPy's name for the type of the logits outputs. Raises ConfigError for what NumPy does not have."""
    types = {output["name"]: output["data_type"] for output in model_config["output"]}
    names = {"TYPE_FP32": "float32", "TYPE_FP16": "float16"}
    found = types.get("generation_logits", "TYPE_FP32")
    if found not in names or types.get("context_logits", found) != found:
        raise ConfigError(f"logits_datatype must be TYPE_FP32 or TYPE_FP16, got {found}")
    return names[found]


def engine_config(parameters: Mapping[str, str]) -> EngineConfig:
    """Raises ConfigError naming the parameter that is missing, unparsable or asks for what is not there."""
    kind = value_of(parameters, "gpt_model_type")
    if kind not in TYPES:
        raise ConfigError(
            "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching. "
            f"Got {kind!r} (template variable batching_strategy)"
        )
    for name, allowed in HARMLESS.items():
        text = value_of(parameters, name)
        if text is not None and text not in allowed:
            raise ConfigError(
                f"parameter {name} value of '{text}' is not supported; leave it empty"
                + (f" or use {' or '.join(allowed)}" if allowed else "")
            )
    path = value_of(parameters, "gpt_model_path")
    if path is None:
        raise ConfigError(
            "parameter gpt_model_path (template variable engine_dir) must name the model directory"
        )
    built = read_build_config(Path(path))
    options: dict[str, Any] = {}
    _take(parameters, options, int, "max_num_tokens", "max_seq_len", "tokens_per_block")
    _take(parameters, options, int, "max_tokens_in_paged_kv_cache", "max_queue_size", "max_beam_width")
    _take(parameters, options, int, "cuda_graph_cache_size")
    _take(parameters, options, float, "kv_cache_free_gpu_mem_fraction")
    _take(parameters, options, str, "batch_scheduler_policy", "device", "dtype")
    sequences = value_of(parameters, "max_num_sequences")
    if sequences is not None:
        options["max_batch_size"] = _parse("max_num_sequences", sequences, int)
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
        value = built.settle(name, options.get(name))
        if value is not None:
            options[name] = value
    _check_window(parameters, Path(path), options.get("max_seq_len"))
    if value_of(parameters, "guided_decoding_backend") is not None:
        options["tokenizer_dir"] = Path(value_of(parameters, "tokenizer_dir") or path)
    if value_of(parameters, "cuda_graph_mode") is not None:
        options["enable_cuda_graph"] = flag(parameters, "cuda_graph_mode", True)
    return EngineConfig(
        model_dir=Path(path),
        enable_kv_cache_reuse=flag(parameters, "enable_kv_cache_reuse", True),
        wrap_input_ids=flag(parameters, "wrap_input_ids", False),
        enable_chunked_context=flag(parameters, "enable_chunked_context", True),
        quant=built.settle_quant(quant_config(parameters)),
        lora=_lora_config(parameters, built),
        **options,
    )


def _check_window(parameters: Mapping[str, str], path: Path, max_seq_len: int | None) -> None:
    """A window as long as the longest sequence hides nothing; a shorter one would."""
    name = "max_attention_window_size"
    text = value_of(parameters, name)
    if text is None:
        return
    sizes = [_parse(name, part.strip(), int) for part in text.split(",")]
    longest = max_seq_len or _max_positions(path)
    if longest is None or min(sizes) < longest:
        rest = "" if longest is None else f", or use the longest sequence's length, {longest}, or more"
        raise ConfigError(f"parameter {name} value of '{text}' is not supported; leave it empty{rest}")


def _max_positions(path: Path) -> int | None:
    try:
        told = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reading the model says what is wrong with it
    return positions(told)


def positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that a config.json knows."""
    found = [config[name] for name in POSITIONS if isinstance(config.get(name), int)]
    return found[0] if found else None


def quant_config(parameters: Mapping[str, str]) -> QuantConfig | None:
    """What the base is to be rounded to. Raises ConfigError."""
    options: dict[str, Any] = {}
    _take(parameters, options, str, "quant_algo", "kv_cache_quant_algo")
    size = value_of(parameters, "quant_group_size")
    if size is not None:
        options["group_size"] = _parse("quant_group_size", size, int)
    try:
        return QuantConfig(**options) if options else None
    except ValueError as error:
        raise ConfigError(f"parameters of quantisation: {error}") from error


def _lora_config(parameters: Mapping[str, str], built: BuildConfig) -> LoraCacheConfig:
    found: dict[str, Any] = {}
    _take(parameters, found, int, "lora_cache_optimal_adapter_size", "lora_cache_max_adapter_size")
    _take(parameters, found, int, "lora_cache_host_memory_bytes", "lora_cache_gpu_memory_bytes")
    _take(parameters, found, float, "lora_cache_gpu_memory_fraction")
    options = {name.removeprefix("lora_cache_"): value for name, value in found.items()}
    _take(parameters, options, int, "max_lora_rank")
    prefetch = value_of(parameters, "lora_prefetch_dir")
    catalog = value_of(parameters, "lora_catalog_dir")
    allowed = value_of(parameters, "lora_allowed_path") or ""
    targets = value_of(parameters, "lora_target_modules") or ""
    rank = built.settle("max_lora_rank", options.get("max_lora_rank"))
    if rank is not None:
        options["max_lora_rank"] = rank
    return LoraCacheConfig(
        prefetch_dir=Path(prefetch) if prefetch else None,
        catalog_dir=Path(catalog) if catalog else None,
        allowed_paths=tuple(Path(path.strip()) for path in allowed.split(",") if path.strip()),
        target_modules=built.settle_targets(
            tuple(name.strip() for name in targets.split(",") if name.strip())
        ),
        **options,
    )


def _take(
    parameters: Mapping[str, str], into: dict[str, Any], kind: Callable[[str], Any], *names: str
) -> None:
    for name in names:
        text = value_of(parameters, name)
        if text is not None:
            into[name] = _parse(name, text, kind)


def _parse(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"parameter {name} must be {wanted}, got {text!r}") from error
