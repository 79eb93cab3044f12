"""What `manylora build` recorded in a directory: limits that are defaults and upper bounds in serving."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora.errors import ConfigError
from manylora.quant.config import QuantConfig

__all__ = ["BuildConfig", "read_build_config"]

KEY = "build_config"
LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens")


@dataclass(frozen=True)
class BuildConfig:
    """None: not recorded. max_seq_len and max_num_tokens in tokens; target modules as attn_q, empty: all.

    quant_algo: what the weights are held in; None: plain. kv_cache_quant_algo: of keys and values.
    """

    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_lora_rank: int | None = None
    lora_target_modules: tuple[str, ...] = ()
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    lora: Mapping[str, Any] = field(default_factory=dict)

    def settle(self, name: str, asked: int | None) -> int | None:
        """The value to serve with. Raises ConfigError when more is asked than was built for."""
        built = getattr(self, name)
        if built is not None and asked is not None and asked > built:
            raise ConfigError(
                f"{name} ({asked}) is larger than the directory was built for ({built}): lower it, or build "
                f"again with --{name} {asked}"
            )
        return built if asked is None else asked

    def settle_quant(self, asked: QuantConfig | None) -> QuantConfig | None:
        """What is asked; else what was recorded of the KV cache, as the weights say for themselves."""
        if asked is None and self.kv_cache_quant_algo is not None:
            return QuantConfig(kv_cache_quant_algo=self.kv_cache_quant_algo)
        return asked

    def settle_targets(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """Raises ConfigError for a module that was not built for."""
        others = [name for name in asked if self.lora_target_modules and name not in self.lora_target_modules]
        if others:
            raise ConfigError(
                f"lora_target_modules: {others[0]} is not among those the directory was built for "
                f"({', '.join(self.lora_target_modules)}); build again with it"
            )
        return asked or self.lora_target_modules


def read_build_config(model_dir: Path) -> BuildConfig:
    """All None for a directory that `manylora build` did not write, or that is not there: who opens the model
    says so. Raises ConfigError for a record that cannot be read."""
    path = Path(model_dir) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        record = raw.get(KEY) if isinstance(raw, dict) else None
    except (OSError, ValueError):
        return BuildConfig()
    if record is None:
        return BuildConfig()
    try:
        lora = record.get("lora_config") or {}
        quantization = raw["pretrained_config"]["quantization"]
        limits = {name: None if record.get(name) is None else int(record[name]) for name in LIMITS}
        rank = lora.get("max_lora_rank")
        return BuildConfig(
            **limits,
            max_lora_rank=None if rank is None else int(rank),
            lora_target_modules=tuple(lora.get("lora_target_modules", ())),
            quant_algo=quantization["quant_algo"],
            kv_cache_quant_algo=quantization["kv_cache_quant_algo"],
            lora=lora,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {KEY} is not what manylora build writes ({error}); build it again"
        ) from error
