"""The order in which PEFT comes upon a model's linear layers, which TinyLoRA and UniLoRA count them in."""

from __future__ import annotations

import re
from collections.abc import Iterable

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft_names import LAYER

# Of the families whose layers are so; in others, such as OPT and those with recurrent layers, it is another.
ATTENTION = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query_key_value", "dense", "c_proj",
)  # fmt: skip
MLP = (
    "gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "down_proj", "fc2", "c_proj",
    "dense_4h_to_h",
)  # fmt: skip
PATH = re.compile(rf"(?!.*decoder).*?\b{LAYER}(?:(?P<mlp>mlp)|\w*attn|\w*attention)\.(?P<name>\w+)")


def in_model_order(paths: Iterable[str]) -> list[str]:
    """Raises AdapterInvalidError for a module whose place is not known."""
    return sorted(paths, key=_place)


def _place(path: str) -> tuple[int, bool, int]:
    found = PATH.fullmatch(path)
    names = MLP if found and found["mlp"] else ATTENTION
    if found is None or found["name"] not in names:
        raise AdapterInvalidError(
            f"{path}: which part of the adapter belongs to it depends on the order of the model's modules, "
            "which is not known of this one: merge it into the base with PEFT"
        )
    return int(found["layer"]), bool(found["mlp"]), names.index(found["name"])
