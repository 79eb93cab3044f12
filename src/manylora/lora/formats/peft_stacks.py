"""PEFT on encoder-decoder models: two stacks of layers in one numbering, the encoder's first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft_parts import Parts, add_part
from manylora.lora.formats.tensor_files import RawTensor
from manylora.lora.modules import LoraModule
from manylora.lora.modules import LoraModuleId as Id

ATTENTION = {
    "q_proj": Id.ATTN_Q, "k_proj": Id.ATTN_K, "v_proj": Id.ATTN_V,
    "out_proj": Id.ATTN_DENSE, "q": Id.ATTN_Q, "k": Id.ATTN_K,
    "v": Id.ATTN_V, "o": Id.ATTN_DENSE,
}  # fmt: skip
MLP = {
    "fc1": Id.MLP_H_TO_4H, "fc2": Id.MLP_4H_TO_H, "wi": Id.MLP_H_TO_4H,
    "wi_0": Id.MLP_H_TO_4H, "wi_1": Id.MLP_GATE, "wo": Id.MLP_4H_TO_H,
}  # fmt: skip
STACK = r"(?P<path>(?:(?:base_model|model)\.)*(?P<stack>encoder|decoder)\."
LAYER = r"(?:layers|block)\.(?P<layer>\d{1,5})\."
MODULE = (
    rf"{STACK}(?:(?P<project>project_in|project_out)|{LAYER}(?:layer\.\d\.)?"
    r"(?:(?P<attention>self_attn|SelfAttention)\.|(?P<cross>encoder_attn|EncDecAttention)\.|"
    r"DenseReluDense\.)?(?P<name>\w+)))\."
)
STACK_KEY = re.compile(
    MODULE + r"(?:lora_(?P<side>[AB])\.weight|lora_magnitude_vector(?:\.weight)?|weight_m_wdecomp\.weight)"
)
"""As the key of a decoder alone, with the name of the stack. project: of OPT's layers around all others."""
STACK_BIAS = re.compile(MODULE + r"(?P<part>(?:base_layer|lora_B)\.bias|bias)")
STACK_NORM = re.compile(
    rf"{STACK}(?:{LAYER}(?P<name>layer\.\d\.layer_norm|\w+_layer_norm)"
    r"|(?P<final>final_layer_norm)|layernorm_embedding))\.(?P<part>weight|bias)"
)
"""final: of the stack's output; neither that nor a name: of its input."""


def stack_parts(
    tensors: Mapping[str, RawTensor], modules: Mapping[int, LoraModule] | None
) -> dict[tuple[int, int], Parts]:
    """The tensors of each (layer, module id), all of keys that match STACK_KEY. modules: the model's; without
    them nobody knows how many layers the encoder has. Raises AdapterInvalidError."""
    found: dict[tuple[int, int], Parts] = {}
    for key, tensor in sorted(tensors.items()):
        match = STACK_KEY.fullmatch(key)
        assert match is not None
        module_id = stack_module_id(match)
        if module_id is None:
            raise AdapterInvalidError(f"{key}: no such LoRA module is known")
        place = stack_layer(key, match, modules), module_id
        add_part(found.setdefault(place, {}), match, tensor)
    return found


def check_stacks(keys: Iterable[str], modules: Mapping[int, LoraModule] | None) -> None:
    """keys: of layers that belong to neither stack. Raises AdapterInvalidError on a model that has two."""
    key = next(iter(keys), None)
    if key is not None and encoder_layers(modules):
        raise AdapterInvalidError(
            f"{key} names neither encoder nor decoder: the adapter was made for another model"
        )


def encoder_layers(modules: Mapping[int, LoraModule] | None) -> int:
    """How many layers the encoder has; 0 without one, or where modules are not known."""
    return max((module.encoder_layers for module in (modules or {}).values()), default=0)


def is_named_decoder(modules: Mapping[int, LoraModule] | None) -> bool:
    """Whether this is a decoder alone whose names begin with `decoder.` nevertheless, as OPT's do."""
    return any(module.named_decoder for module in (modules or {}).values())


def stack_module_id(match: re.Match[str]) -> Id | None:
    """Of a match of STACK_KEY or STACK_BIAS; None: no linear layer is called so."""
    if match["project"]:
        return Id[match["project"].upper()]
    module_id = (ATTENTION if match["attention"] or match["cross"] else MLP).get(match["name"])
    return Id[f"CROSS_{module_id.name}"] if module_id is not None and match["cross"] else module_id


def stack_layer(key: str, match: re.Match[str], modules: Mapping[int, LoraModule] | None) -> int:
    """Its number through both stacks. Raises AdapterInvalidError."""
    if modules is None:
        raise AdapterInvalidError(
            f"{key}: a decoder's layers are numbered after its encoder's, and how many these are depends on "
            "the base model, which is not known here: name it, or convert the adapter with "
            "`manylora convert --base`"
        )
    count, layer = encoder_layers(modules), int(match["layer"] or 0)
    if match["stack"] == "decoder" and is_named_decoder(modules):
        return layer
    if not count:
        raise AdapterInvalidError(f"{key} belongs to an encoder-decoder model; this model has no encoder")
    if match["stack"] == "decoder":
        return count + layer
    if layer >= count:
        raise AdapterInvalidError(f"{key}: the encoder of this model has {count} layers")
    return layer
