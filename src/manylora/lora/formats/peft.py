"""PEFT directories: adapter_config.json and adapter_model.safetensors.

Strict: an adapter of which a part would be lost is refused with the reason.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.tensors import AdapterRow

__all__ = ["has_peft", "read_peft"]

MODULE_IDS = {
    "qkv_proj": 0, "query_key_value": 0, "q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "dense": 4,
    "gate_proj": 5, "c_fc": 5, "down_proj": 6, "c_proj": 6, "up_proj": 7, "gate_up_proj": 18,
}  # fmt: skip
KEY = re.compile(
    r"(?P<path>.*\.layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<name>\w+))\.lora_(?P<side>[AB])\.weight"
)
REFUSED = (
    (re.compile(r"lora_magnitude_vector|weight_m_wdecomp"), "DoRA magnitudes must be normalised by the base"),
    (re.compile(r"embed|lm_head"), "adapters on the embedding or the head are not supported"),
    (re.compile(r"\.bias$"), "trained biases are not supported"),
    (re.compile(r"modules_to_save"), "full modules are not supported"),
)


def has_peft(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def read_peft(folder: Path, partial: list[str] | None = None) -> list[AdapterRow]:
    """Rows in float32, the scaling folded into B; ascending by layer and module.

    Scaling is alpha / r, or alpha / sqrt(r) with use_rslora; r is the matrix's own rank, alpha is
    alpha_pattern's where it matches. partial: a list that takes a line for each part left out; None refuses
    such adapters. Raises AdapterInvalidError.
    """
    config = _config(folder)
    pairs: dict[tuple[int, int], dict[str, tuple[str, np.ndarray]]] = {}
    for key, tensor in _tensors(folder).items():
        found = KEY.fullmatch(key)
        if found is None or found["name"] not in MODULE_IDS:
            _leave_out(key, partial)
            continue
        pair = pairs.setdefault((int(found["layer"]), MODULE_IDS[found["name"]]), {})
        if found["side"] in pair:
            raise AdapterInvalidError(f"{key} and {pair[found['side']][0]} mean the same module")
        pair[found["side"]] = (found["path"], tensor)
    if not pairs:
        raise AdapterInvalidError("adapter_model.safetensors holds no LoRA matrices")
    return [_row(layer, module_id, pairs[layer, module_id], config) for layer, module_id in sorted(pairs)]


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterInvalidError("adapter_config.json is missing or not valid JSON") from error
    if not isinstance(config, dict) or not isinstance(config.get("lora_alpha"), int | float):
        raise AdapterInvalidError("adapter_config.json has no number lora_alpha: not a LoRA adapter of PEFT")
    return config


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        hint = (
            " (.bin files hold pickles and are not read)" if (folder / "adapter_model.bin").is_file() else ""
        )
        raise AdapterInvalidError(f"adapter_model.safetensors is missing{hint}")
    # torch reads bfloat16, which NumPy does not know; imported here to keep the rest light.
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key).to(torch.float32).numpy() for key in sorted(file.keys())}
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise AdapterInvalidError(
            f"adapter_model.safetensors is not readable: {str(error).splitlines()[0]}"
        ) from error


def _leave_out(key: str, partial: list[str] | None) -> None:
    reason = next((text for pattern, text in REFUSED if pattern.search(key)), "no such LoRA module is known")
    if partial is None:
        raise AdapterInvalidError(f"{key}: {reason}")
    partial.append(f"no match {key}: {reason}")


def _row(
    layer: int, module_id: int, pair: dict[str, tuple[str, np.ndarray]], config: dict[str, Any]
) -> AdapterRow:
    missing = {"A", "B"} - pair.keys()
    if missing:
        present = next(iter(pair.values()))[0]
        raise AdapterInvalidError(f"{present} is missing its lora_{missing.pop()} matrix")
    (path, a), (_, b) = pair["A"], pair["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] == 0:
        raise AdapterInvalidError(
            f"{path}: adapter size of A {a.shape} mismatches adapter size of B {b.shape}"
        )
    rank = a.shape[0]
    if module_id == 18:  # PEFT has [gate; up], the tensor format [up; gate]
        b = np.concatenate((b[len(b) // 2 :], b[: len(b) // 2]))
    b = b * np.float32(_scale(path, rank, config))
    return AdapterRow(module_id, layer, rank, False, np.concatenate((a.ravel(), b.ravel())))


def _scale(path: str, rank: int, config: dict[str, Any]) -> float:
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            alpha = value
            break
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
