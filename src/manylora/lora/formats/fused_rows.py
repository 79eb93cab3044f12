"""How a base model orders the rows of its fused `query_key_value` or `wqkv`, from its config.json alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft_config import CONFIG
from manylora.lora.module_sizes import Split
from manylora.lora.modules import LoraModule, LoraModuleId

MODEL_CONFIG = "config.json"


def find_model_config(adapter: Path, base: Path | None) -> Path | None:
    """config.json of the base model: in `base`, else beside the adapter, else in the directory that
    adapter_config.json names as the base. None when there is none."""
    folders = [base] if base is not None else [adapter, _named_base(adapter)]
    files = [folder / MODEL_CONFIG for folder in folders if folder is not None]
    return next((file for file in files if file.is_file()), None)


def read_fused_rows(file: Path) -> dict[int, LoraModule]:
    """attn_qkv of a model that keeps q, k, v in groups of heads, by its id; empty for other models.

    file: config.json of a Falcon, GPT-NeoX, Bloom or InternLM 2 model. Raises AdapterInvalidError.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        counts = _heads_and_groups(raw)
        if counts is None:
            return {}
        heads, kv_heads = counts
        hidden = int(raw.get("n_embed") or raw["hidden_size"])
        size = hidden // heads
        if hidden % heads or heads % kv_heads:
            raise ValueError(f"{heads} heads of {hidden} and {kv_heads} key heads")
    except KeyError as error:
        raise AdapterInvalidError(f"{file.name} of the base model lacks {error}") from error
    except (AttributeError, OSError, TypeError, ValueError, RecursionError) as error:
        raise AdapterInvalidError(f"{file.name} of the base model cannot be read: {error}") from error
    parts = (hidden, kv_heads * size, kv_heads * size)
    fused = LoraModuleId.ATTN_QKV
    return {fused: LoraModule(fused, hidden, sum(parts), Split.B_ROWS, parts=parts, groups=kv_heads)}


def _heads_and_groups(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Query heads, and how many groups of them a key head each; those are the groups of rows, too."""
    kind = raw.get("model_type")
    if kind not in ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_neox", "bloom", "internlm2"):
        return None
    heads = int(raw.get("n_head") or raw["num_attention_heads"])
    if kind == "internlm2":
        return heads, int(raw.get("num_key_value_heads") or heads)
    if kind in ("gpt_neox", "bloom"):
        return heads, heads
    if raw.get("new_decoder_architecture", kind == "RefinedWeb"):
        return heads, int(raw.get("num_kv_heads") or raw.get("n_head_kv") or heads)
    return heads, 1 if raw.get("multi_query", True) else heads


def _named_base(adapter: Path) -> Path | None:
    try:
        named = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (AttributeError, OSError, ValueError, RecursionError):
        return None  # the reader of the adapter says what is wrong
    return Path(named) if isinstance(named, str) and named and "\0" not in named else None
