"""Adapters of mlx-lm: adapters.safetensors beside an adapter_config.json of its own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manylora.adapters.formats.base_weights import BaseReader
from manylora.adapters.formats.tensor_files import RawTensor
from manylora.errors import AdapterInvalidError

WEIGHTS = "adapters.safetensors"
KIND = "fine_tune_type"
SETTINGS = "lora_parameters"
# Ends of names, of linear layers [in, r], [r, out], of the experts of a layer [E, r, in], [E, out, r].
PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}


def settings_in_peft(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in PEFT's words. KIND stays, and marks the tensors as mlx-lm's. Raises
    AdapterInvalidError."""
    kind, lora = given.get(KIND, "lora"), given.get(SETTINGS)
    if kind not in ("lora", "dora"):
        raise AdapterInvalidError(
            f"adapter_config.json sets {KIND} to {str(kind)[:40]}: served are lora and dora; of a model that "
            "was trained as a whole serve the folder that mlx_lm.fuse writes"
        )
    lora = lora if isinstance(lora, dict) else {}
    rank, scale = lora.get("rank", 0), lora.get("scale", "")
    right = type(rank) is int and 0 < rank < 2**31 and type(scale) in (int, float) and abs(scale) < 1e30
    if not right:
        raise AdapterInvalidError(
            f"adapter_config.json: {SETTINGS} must have rank, a positive number, and scale, a number"
        )
    return {
        "peft_type": "LORA", "r": rank, "lora_alpha": float(scale) * rank, "use_dora": kind == "dora",
        "target_modules": "all-linear", "base_model_name_or_path": str(given.get("model") or ""), KIND: kind,
    }  # fmt: skip


def tensors_in_peft(tensors: Mapping[str, RawTensor], base: BaseReader | None) -> dict[str, RawTensor]:
    """The tensors by PEFT's names and in its shapes; those of experts stay stacked. base: an open base model.
    Raises AdapterInvalidError."""
    found: dict[str, RawTensor] = {}
    for key, tensor in tensors.items():
        path, _, part = key.rpartition(".")
        if part not in PARTS:
            raise AdapterInvalidError(f"{key[:200]} is neither lora_a, lora_b nor m of an adapter of mlx-lm")
        if len(tensor.shape) not in ((1,) if part == "m" else (2, 3)):
            raise AdapterInvalidError(f"{key} cannot have the shape {tensor.shape}")
        name = f"base_model.model.{path}".replace(".switch_mlp.", ".experts.")
        is_table = path.endswith("embed_tokens")
        if part == "m":
            if is_table:
                raise AdapterInvalidError(f"{key}: mlx-lm's DoRA of an embedding is not served, LoRA is")
            found[f"{name}.{PARTS[part]}"] = tensor
        elif is_table:
            found[f"{name}.lora_embedding_{part[-1].upper()}"] = tensor.turned(key)
            if base is None:
                raise AdapterInvalidError(f"{key}: whether the head is tied to it is not known: name --base")
            if base.find("lm_head.weight") is None:  # there it multiplies with the same matrices
                other = "lm_head.lora_B.weight" if part == "lora_a" else "lm_head.lora_A.weight"
                found[f"base_model.model.{other}"] = tensor
        else:
            found[f"{name}.{PARTS[part]}"] = tensor if len(tensor.shape) == 3 else tensor.turned(key)
    return found
