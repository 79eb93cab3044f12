"""PEFT directories: adapter_config.json and adapter_model.safetensors.

Strict: an adapter of which a part would be lost, or that means more than B A x, is refused with the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from manylora.errors import AdapterInvalidError
from manylora.lora.formats import one_line
from manylora.lora.modules import MODULE_NAMES, LoraModule
from manylora.lora.tensors import BFLOAT16, AdapterRow, widen_bfloat16

__all__ = ["has_peft", "read_peft"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MODULE_IDS = {
    "qkv_proj": 0, "query_key_value": 0, "q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "dense": 4,
    "gate_proj": 5, "c_fc": 5, "down_proj": 6, "c_proj": 6, "up_proj": 7, "gate_up_proj": 18,
}  # fmt: skip
GATE_UP = MODULE_IDS["gate_up_proj"]
KEY = re.compile(
    r"(?P<path>(?P<root>(?:(?:base_model|model|language_model|transformer)\.)*)"
    r"layers\.(?P<layer>\d{1,5})\.(?:self_attn|mlp)\.(?P<name>\w+))\.lora_(?P<side>[AB])\.weight"
)
DTYPES: dict[str, type[np.floating]] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
DORA = re.compile(r"lora_magnitude_vector|weight_m_wdecomp")
DORA_REASON = (
    "DoRA magnitudes must be divided by the base's row norms before they are served; normalise the adapter "
    "and send its tensors with is_dora 1"
)
REFUSED = (
    (re.compile(r"embed|lm_head"), "adapters on the embedding or the head are not supported"),
    (re.compile(r"\.bias$"), "trained biases are not supported"),
    (re.compile(r"^(?!.*\.lora_)"), "full weights (modules_to_save) are not supported"),
)
# Settings under which PEFT computes something else than the base plus scale * B A x.
UNSUPPORTED = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config",
    "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
# Initialisations that also change the base model's weights.
CHANGED_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


def has_peft(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_peft(
    folder: Path, partial: list[str] | None = None, modules: Mapping[int, LoraModule] | None = None
) -> list[AdapterRow]:
    """Rows in float32, the scaling folded into B; ascending by layer and module.

    Scaling is alpha / r, or alpha / sqrt(r) with use_rslora; r is the matrix's own rank, alpha is
    alpha_pattern's where it matches. partial: a list that takes a line for each part left out; None refuses
    such adapters. modules: the model's, whose dimensions the matrices must then have. Raises
    AdapterInvalidError.
    """
    config = _config(folder)
    pairs: dict[tuple[int, int], dict[str, tuple[str, np.ndarray]]] = {}
    roots: dict[str, str] = {}
    for key, tensor in sorted(_tensors(folder).items()):
        found = KEY.fullmatch(key)
        if found is None or found["name"] not in MODULE_IDS:
            _leave_out(key, partial)
            continue
        roots.setdefault(found["root"], key)
        pair = pairs.setdefault((int(found["layer"]), MODULE_IDS[found["name"]]), {})
        if found["side"] in pair:
            raise AdapterInvalidError(f"{key} and {pair[found['side']][0]} mean the same module")
        pair[found["side"]] = (found["path"], _decode(key, tensor))
    if not pairs:
        raise AdapterInvalidError(f"{WEIGHTS} holds no LoRA matrices")
    if len(roots) > 1:
        raise AdapterInvalidError(f"{' and '.join(roots.values())} belong to two models")
    return [_row(layer, module, pairs[layer, module], config, modules) for layer, module in sorted(pairs)]


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise AdapterInvalidError(f"{CONFIG} is missing: not an adapter directory of PEFT")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterInvalidError(f"{CONFIG} is not readable JSON: {one_line(error)}") from error
    if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
        raise AdapterInvalidError(f"{CONFIG} does not describe a LoRA adapter (peft_type LORA)")
    for name in UNSUPPORTED:
        if config.get(name):
            why = DORA_REASON if name == "use_dora" else "this kind of LoRA is not supported"
            raise AdapterInvalidError(f"{CONFIG} sets {name}: {why}")
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(CHANGED_BASE):
        raise AdapterInvalidError(
            f"{CONFIG} sets init_lora_weights to {start[:40]}: the adapter needs a changed base model; "
            "convert it to a plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )
    config["lora_alpha"] = _finite(config.get("lora_alpha"), "lora_alpha")
    if not isinstance(config.get("alpha_pattern") or {}, dict):
        raise AdapterInvalidError(f"{CONFIG}: alpha_pattern must map module names to numbers")
    return config


def _finite(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str):
        raise AdapterInvalidError(f"{CONFIG}: {name} must be a number, got {str(value)[:40]}")
    return number


def _tensors(folder: Path) -> dict[str, dict[str, Any]]:
    """Key to dtype, shape and data."""
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = ": adapter_model.bin is a pickle and is not read, save as safetensors" if pickled else ""
        raise AdapterInvalidError(f"{WEIGHTS} is missing{hint}")
    try:
        return dict(deserialize(path.read_bytes()))
    except Exception as error:  # the library has no common class for all it raises
        raise AdapterInvalidError(f"{WEIGHTS} is not readable: {one_line(error)}") from error


def _decode(key: str, tensor: dict[str, Any]) -> np.ndarray:
    """Any floating type to float32, in the tensor's shape."""
    kind = tensor["dtype"]
    if kind == "BF16":
        values = widen_bfloat16(np.frombuffer(tensor["data"], BFLOAT16))
    elif kind in DTYPES:
        with np.errstate(over="ignore"):
            values = np.frombuffer(tensor["data"], DTYPES[kind]).astype(np.float32)
    else:
        raise AdapterInvalidError(f"{key} must be float32, float16 or bfloat16, got {kind}")
    if not np.isfinite(values).all():
        raise AdapterInvalidError(f"{key} holds a NaN or an infinity")
    return values.reshape(tensor["shape"])


def _leave_out(key: str, partial: list[str] | None) -> None:
    if DORA.search(key):  # without its magnitudes it would be another adapter
        raise AdapterInvalidError(f"{key}: {DORA_REASON}")
    reason = next((text for pattern, text in REFUSED if pattern.search(key)), "no such LoRA module is known")
    if partial is None:
        raise AdapterInvalidError(f"{key}: {reason}")
    partial.append(f"no match {key}: {reason}")


def _row(
    layer: int,
    module_id: int,
    pair: dict[str, tuple[str, np.ndarray]],
    config: dict[str, Any],
    modules: Mapping[int, LoraModule] | None,
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
    if modules is not None and module_id in modules:
        _check_dims(path, (a.shape[1], b.shape[0]), modules[module_id])
    if module_id == GATE_UP:
        b = _swap_halves(path, b)
    b = b * np.float32(_scale(path, rank, config))
    return AdapterRow(module_id, layer, rank, False, np.concatenate((a.ravel(), b.ravel())))


def _check_dims(path: str, found: tuple[int, int], module: LoraModule) -> None:
    if found != (module.in_dim, module.out_dim):
        raise AdapterInvalidError(
            f"{path} goes from {found[0]} to {found[1]} dimensions, {MODULE_NAMES[module.module_id]} of this "
            f"model from {module.in_dim} to {module.out_dim}: the adapter was made for another model"
        )


def _swap_halves(path: str, b: np.ndarray) -> np.ndarray:
    """PEFT has [gate; up], the tensor format [up; gate]."""
    half, odd = divmod(len(b), 2)
    if odd:
        raise AdapterInvalidError(f"{path}: the fused gate and up must have an even number of rows")
    return np.concatenate((b[half:], b[:half]))


def _scale(path: str, rank: int, config: dict[str, Any]) -> float:
    alpha = config["lora_alpha"]
    name = path.removeprefix("base_model.model.")
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if _matches(pattern, name):
            alpha = _finite(value, f"alpha_pattern of {pattern}")
            break
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _matches(pattern: str, name: str) -> bool:
    """PEFT's rule. Repeated groups and many repetitions are refused: they can take for ever to match."""
    if re.search(r"\)[*+{]", pattern) or len(re.findall(r"(?<!\()[*+?{]", pattern)) > 4:
        raise AdapterInvalidError(f"{CONFIG}: the alpha_pattern {pattern[:80]} is too involved")
    try:
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterInvalidError(f"{CONFIG}: alpha_pattern {pattern[:80]} is not a pattern") from error
