"""The only way to an EngineConfig: the user's settings, else the build record, else defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.engine import QUANT_SETTINGS, EngineConfig, LoraCacheConfig
from manylora.config.settings import Setting, read_json, rows
from manylora.errors import ConfigError

KEY = "build_config"
LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens", "max_beam_width")


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


Settings = Mapping[str, Any]
"""Values by the names of the rows of SETTINGS. A missing name was not set."""

QUANT_KEYS = tuple(dict.fromkeys(row.name for row in QUANT_SETTINGS))
QKV_GROUPS = (("attn_q", "attn_k", "attn_v"), ("cross_attn_q", "cross_attn_k", "cross_attn_v"))
NOTHING: Settings = MappingProxyType({})


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
