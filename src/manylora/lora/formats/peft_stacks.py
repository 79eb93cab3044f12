"""PEFT on encoder-decoder models: two stacks of layers in one numbering, the encoder's first."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.tensor_files import RawTensor, decode
from manylora.lora.modules import LoraModule

__all__ = ["STACK_KEY", "stack_parts"]

ATTENTION = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "out_proj": 4, "q": 1, "k": 2, "v": 3, "o": 4}
MLP = {"fc1": 5, "fc2": 6, "wi": 5, "wi_0": 5, "wi_1": 7, "wo": 6}
CROSS = 8  # ids of cross-attention are those of self-attention, so much higher
STACK_KEY = re.compile(
    r"(?P<path>(?:(?:base_model|model)\.)*(?P<stack>encoder|decoder)\.(?:layers|block)\.(?P<layer>\d{1,5})\."
    r"(?:layer\.\d\.)?(?:(?P<attention>self_attn|SelfAttention)\.|(?P<cross>encoder_attn|EncDecAttention)\.|"
    r"DenseReluDense\.)?(?P<name>\w+))\."
    r"(?:lora_(?P<side>[AB])\.weight|lora_magnitude_vector(?:\.weight)?|weight_m_wdecomp\.weight)"
)
"""As the key of a decoder alone, with the name of the stack."""

Parts = dict[str, tuple[str, np.ndarray]]  # "A", "B", "magnitude" -> path of the module, values


def stack_parts(
    tensors: Mapping[str, RawTensor], modules: Mapping[int, LoraModule] | None
) -> dict[tuple[int, int], Parts]:
    """The tensors of each (layer, module id), all of keys that match STACK_KEY. modules: the model's; without
    them nobody knows how many layers the encoder has. Raises AdapterInvalidError."""
    found: dict[tuple[int, int], Parts] = {}
    for key, tensor in sorted(tensors.items()):
        match = STACK_KEY.fullmatch(key)
        assert match is not None
        name = match["name"]
        module_id = (ATTENTION if match["attention"] or match["cross"] else MLP).get(name)
        if module_id is None:
            raise AdapterInvalidError(f"{key}: no such LoRA module is known")
        place = _layer(key, match, modules), module_id + CROSS * bool(match["cross"])
        part, parts = match["side"] or "magnitude", found.setdefault(place, {})
        if part in parts:
            raise AdapterInvalidError(f"{key} and {parts[part][0]} mean the same module")
        parts[part] = (match["path"], decode(key, tensor))
    return found


def _layer(key: str, match: re.Match[str], modules: Mapping[int, LoraModule] | None) -> int:
    if modules is None:
        raise AdapterInvalidError(
            f"{key}: a decoder's layers are numbered after its encoder's, and how many these are depends on "
            "the base model, which is not known here: name it, or convert the adapter with "
            "`manylora convert --base`"
        )
    count, layer = next(iter(modules.values())).encoder_layers, int(match["layer"])
    if not count:
        raise AdapterInvalidError(f"{key} belongs to an encoder-decoder model; this model has no encoder")
    if match["stack"] == "decoder":
        return count + layer
    if layer >= count:
        raise AdapterInvalidError(f"{key}: the encoder of this model has {count} layers")
    return layer
