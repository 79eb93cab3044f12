"""Trainable tokens: rows of the embedding alone, as `trainable_token_indices` of a LoRA."""

from __future__ import annotations

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.kinds.form import LoraForm, PeftFiles
from manylora.lora.formats.peft_config import config_of
from manylora.lora.formats.peft_shared import TOKENS

DELTA = TOKENS.rpartition(".")[2]


def read_tokens(files: PeftFiles) -> LoraForm:
    """Raises AdapterInvalidError."""
    found, tables = {}, []
    for key, tensor in files.tensors.items():
        path, _, part = key.rpartition(".")
        if part == DELTA and not path.endswith(".token_adapter"):
            tables.append(path.rpartition(".")[2])
            key = f"{path}.{TOKENS}"
        found[key] = tensor
    if not tables:
        raise AdapterInvalidError(f"the adapter holds no {DELTA}")
    ids = files.settings.get("token_indices") or []
    indices = {"trainable_token_indices": dict.fromkeys(tables, ids)}
    return LoraForm(config_of({"lora_alpha": 1, **indices}), found)
