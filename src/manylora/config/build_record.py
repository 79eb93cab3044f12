"""What `manylora build` recorded in a directory: limits that serve as defaults and as upper bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manylora.config.values import read_json
from manylora.errors import ConfigError
from manylora.quant.config import QuantConfig

KEY = "build_config"
RANKS = {"tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size"}
LIMITS = ("max_batch_size", "max_seq_len", "max_num_tokens", "max_beam_width")


@dataclass(frozen=True)
class BuildRecord:
    """None: not recorded. Lengths in tokens; target modules as attn_q, empty: all. quant_algo: of the
    weights. lora: the recorded fields of a LoraConfig. tp_size: tensor-parallel ranks. pp_size: pipeline
    stages.
    """

    max_batch_size: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    max_beam_width: int | None = None
    max_lora_rank: int | None = None
    lora_target_modules: tuple[str, ...] = ()
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    lora: Mapping[str, Any] = field(default_factory=dict)
    tp_size: int = 1
    pp_size: int = 1

    def settings(self) -> dict[str, Any]:
        """The record as settings of `resolve`, without quant_algo, which the weights imply."""
        found = {name: getattr(self, name) for name in (*LIMITS, "max_lora_rank", "kv_cache_quant_algo")}
        found["target_modules"] = self.lora_target_modules or None
        if self.tp_size * self.pp_size > 1:
            found |= {setting: getattr(self, name) for name, setting in RANKS.items()}
        return {name: value for name, value in found.items() if value is not None}


def weights_algo(model_dir: Path, quant: QuantConfig | None) -> str | None:
    """The quant_algo of a model's weights, requested or recorded; None: neither. Raises ConfigError."""
    asked = quant.quant_algo if quant is not None and quant.any_weights else None
    return asked or read_build_record(model_dir).quant_algo


def read_build_record(model_dir: Path) -> BuildRecord:
    """Read the record: all fields are None for a directory that `manylora build` did not write, or that does
    not exist, which opening the model reports. Raises ConfigError for a record that cannot be read.
    """
    path = Path(model_dir) / "config.json"
    raw = read_json(path) or {}
    record = raw.get(KEY)
    if record is None:
        return BuildRecord()
    try:
        lora = record.get("lora_config") or {}
        quantization = raw["pretrained_config"]["quantization"]
        mapping = raw["pretrained_config"].get("mapping", {})
        limits = {name: record.get(name) for name in LIMITS} | {"max_lora_rank": lora.get("max_lora_rank")}
        return BuildRecord(
            **{name: None if limit is None else int(limit) for name, limit in limits.items()},
            lora_target_modules=tuple(lora.get("lora_target_modules", ())),
            quant_algo=quantization["quant_algo"],
            kv_cache_quant_algo=quantization["kv_cache_quant_algo"],
            lora=lora,
            tp_size=int(mapping.get("tp_size", 1)),
            pp_size=int(mapping.get("pp_size", 1)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: {KEY} is not what manylora build writes ({error}); build it again"
        ) from error
