"""Which tensors of a PEFT directory belong to the same linear layer, and why others are refused.

Encoder-decoder models have two stacks of layers in one numbering, the encoder's first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft.names import PEFT_KEY, VISION, layer_of, module_id_of
from manylora.lora.formats.tensor_files import RawTensor
from manylora.lora.modules import LoraModule
from manylora.lora.modules import LoraModuleId as Id

Parts = dict[str, tuple[str, str, RawTensor]]
"""The tensors of one linear layer: "A", "B", "magnitude" -> path of the layer, key, values."""

DORA = re.compile(r"lora_magnitude_vector|weight_m_wdecomp")  # in the keys of DoRA's magnitudes
VISION_REASON = (
    "of the model's vision or audio part, which is not served: set lora_text_only (--lora-text-only) to "
    "leave that out and serve the text part alone"
)
REFUSED = (
    (VISION, VISION_REASON),
    (re.compile(r"wpe.*\.lora_"), "adapters on the position embedding are not supported"),
    (
        re.compile(r"embed_tokens_per_layer\."),
        "adapters on the table of per-layer embeddings are not supported: train without it",
    ),
    (
        re.compile(r"\.(?:linear_attn|conv|mamba|mixer(?=\.(?:conv1d|norm|A_log|D|dt_bias)))\.(?!.*\.lora_)"),
        "of a recurrent layer only the linear layers can be adapted: train without this",
    ),
    (DORA, "this DoRA magnitude belongs to no known LoRA module"),
    (
        re.compile(r"^(?!.*\.lora_)"),
        "full weights and biases of this module are not supported: of modules_to_save the embedding, the "
        "head and norms are",
    ),
)
"""What is told of keys that no linear layer has: the first pattern that is found decides."""


def module_parts(
    tensors: Mapping[str, RawTensor], partial: list[str] | None, modules: Mapping[int, LoraModule] | None
) -> dict[tuple[int, int], Parts]:
    """The tensors of each (layer, module id) of a decoder. `stack_parts` does it for a model of two stacks.

    partial: takes a line for each key that is left out; None: such keys are refused. modules: the model's.
    Raises AdapterInvalidError.
    """
    seen = sorted(key for key in tensors if VISION.search(key))
    if seen and partial is None:
        rest = f" and {len(seen) - 1} other tensors are " if len(seen) > 1 else " is "
        raise AdapterInvalidError(f"{seen[0]}{rest}{VISION_REASON}")
    found: dict[tuple[int, int], Parts] = {}
    roots: dict[str, str] = {}
    for key, tensor in sorted(tensors.items()):
        match = PEFT_KEY.fullmatch(key)
        module_id = module_id_of(match, modules) if match else None
        if match is None or module_id is None:
            _leave_out(key, partial)
            continue
        roots.setdefault(match["root"], key)
        add_part(found.setdefault((layer_of(match), module_id), {}), match, tensor)
    if len(roots) > 1:
        raise AdapterInvalidError(f"{' and '.join(roots.values())} belong to two models")
    return found


def add_part(parts: Parts, match: re.Match[str], tensor: RawTensor) -> None:
    """Add a tensor to those of its layer. match: of its key, with the groups `path` and `side`. Raises
    AdapterInvalidError where the layer has such a tensor already."""
    part, key = match["side"] or "magnitude", match.string
    if part in parts:
        raise AdapterInvalidError(f"{key} and {parts[part][0]} mean the same module")
    parts[part] = (match["path"], key, tensor)


def _leave_out(key: str, partial: list[str] | None) -> None:
    reason = next((text for pattern, text in REFUSED if pattern.search(key)), "no such LoRA module is known")
    # A module without its magnitude would be another adapter, so a magnitude may not be left out.
    if partial is None or (DORA.search(key) and not VISION.search(key)):
        raise AdapterInvalidError(f"{key}: {reason}")
    partial.append(f"no match {key}: {reason}")


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
