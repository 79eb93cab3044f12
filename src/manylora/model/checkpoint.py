"""Reads a model's config.json and generation_config.json into a ModelConfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from manylora.config.engine import ModelConfig
from manylora.errors import ConfigError
from manylora.model.families import FAMILIES
from manylora.model.families.common import read_common
from manylora.quant.checkpoint import checkpoint_quant


def read_model_config(model_dir: Path) -> ModelConfig:
    """Of a Hugging Face directory. Raises ConfigError naming what is missing or not supported."""
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ConfigError(f"the model directory {model_dir} does not exist")
    raw = _read_json(model_dir / "config.json", required=True)
    if "architectures" not in raw and ("pretrained_config" in raw or "mapping" in raw):
        kind = "engine" if "pretrained_config" in raw else "checkpoint"
        raise ConfigError(
            f"{model_dir} is a TensorRT-LLM {kind}: name the Hugging Face directory that it was made from"
        )
    architecture = (raw.get("architectures") or ["none"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(
            f"{model_dir}/config.json: architecture {architecture} is not supported; supported are "
            + ", ".join(FAMILIES)
        )
    quant = checkpoint_quant(raw, model_dir)
    generation = _read_json(model_dir / "generation_config.json")
    if raw.get("is_encoder_decoder") and generation:  # its first token ids override those of config.json
        start = generation.get("decoder_start_token_id", raw.get("decoder_start_token_id"))
        forced = generation.get("forced_bos_token_id")
        raw = {**raw, "decoder_start_token_id": start, "forced_bos_token_id": forced}
    try:
        renamed = family.rename(raw)
        fields = {**read_common(renamed), **family.config(renamed)}
    except KeyError as error:
        raise ConfigError(f"{model_dir}/config.json lacks {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{model_dir}/config.json has a value of the wrong type: {error}") from error
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    config = ModelConfig(architecture=architecture, eos_token_ids=eos_ids, quant=quant, **fields)
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"{model_dir}/config.json: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} key heads equally"
        )
    return config


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ConfigError(f"{path} does not exist: a Hugging Face model directory is needed")
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
