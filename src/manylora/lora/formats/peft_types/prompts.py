"""Kinds of PEFT that put virtual tokens before each prompt: as embeddings (prompt tuning, P-tuning), or as
keys and values (prefix tuning, Cartridge).

PEFT saves what an encoder or a projection gives, not these; so there is nothing to run when it is read.
"""

from __future__ import annotations

import numpy as np

from manylora.errors import AdapterInvalidError
from manylora.lora.formats.peft.module_tensors import encoder_layers
from manylora.lora.formats.peft.settings import CONFIG, PeftConfig, peft_type
from manylora.lora.formats.peft_types.converted import LoraForm, PeftFiles
from manylora.lora.formats.tensor_files import decode
from manylora.lora.modules import LoraModuleId as Id
from manylora.request import LoraExtra

KEY = "prompt_embeddings"


def read_prompt(files: PeftFiles) -> LoraForm:
    """Embeddings [tokens, hidden]. Raises AdapterInvalidError."""
    values = _values(files)
    modules = files.options.modules or {}
    own = files.base.settings if files.base is not None else {}
    if own.get("model_type") == "falcon_h1" and own.get("embedding_multiplier", 1.0) != 1.0:
        raise AdapterInvalidError(
            f"{peft_type(files.settings)} is not supported on a Falcon-H1 with embedding_multiplier: PEFT "
            "leaves that out in the prompt and not in what is generated; train a LoRA instead"
        )
    hidden = next(
        (
            modules[one].in_dim
            for one in (Id.PROJECT_IN, Id.ATTN_Q, Id.ATTN_QKV, Id.ATTN_KV_A)
            if one in modules
        ),
        0,
    )
    if modules and values.shape[1] != hidden:
        raise AdapterInvalidError(
            f"{KEY} has rows of {values.shape[1]} values, embeddings of this model have {hidden}: the "
            "adapter was made for another model"
        )
    return LoraForm(PeftConfig(1.0), {}, [LoraExtra("prompt.weight", values)])


def read_prefix(files: PeftFiles) -> LoraForm:
    """Keys and values [tokens, layers * 2 * kv_size], rotated where the model rotates. Raises
    AdapterInvalidError."""
    values, modules, kind = _values(files), files.options.modules or {}, peft_type(files.settings)
    layers = files.settings.get("num_layers")
    if type(layers) is not int or layers < 1 or values.shape[1] % (2 * layers):
        raise AdapterInvalidError(
            f"{CONFIG}: num_layers must be that of the model whose keys and values {KEY} of shape "
            f"{values.shape} are"
        )
    keys = modules.get(Id.ATTN_K)
    if modules and (keys is None or keys.layers is not None or keys.others):
        raise AdapterInvalidError(
            f"{kind} is not supported on this model: not all of its layers keep the keys and values of the "
            "same heads"
        )
    whole, size = files.options.depth, values.shape[1] // (2 * layers)
    if modules and (size != modules[Id.ATTN_K].out_dim or (whole is not None and layers != whole)):
        raise AdapterInvalidError(
            f"{KEY} holds keys of {size} values for {layers} layers, those of this model have "
            f"{modules[Id.ATTN_K].out_dim}" + (f" and it has {whole} layers" if whole is not None else "")
        )
    parts = values.reshape(len(values), layers, 2, size)
    names = ((layer, part, name) for layer in range(layers) for part, name in enumerate(("keys", "values")))
    extras = [
        LoraExtra(f"layers.{layer}.prefix.{name}", np.ascontiguousarray(parts[:, layer, part]))
        for layer, part, name in names
    ]
    return LoraForm(PeftConfig(1.0), {}, extras)


def _values(files: PeftFiles) -> np.ndarray:
    """[tokens, n] float32, nothing else being there."""
    kind = peft_type(files.settings)
    if encoder_layers(files.options.modules):
        raise AdapterInvalidError(f"{kind} is not supported on encoder-decoder models")
    if any(module.layer_inputs for module in (files.options.modules or {}).values()):
        raise AdapterInvalidError(
            f"{kind} is not supported on models with per-layer embeddings, as virtual tokens have none"
        )
    other = next((key for key in sorted(files.tensors) if key != KEY), None)
    if other is not None or KEY not in files.tensors:
        raise AdapterInvalidError(f"{other or KEY}: a {kind} adapter must hold {KEY} and nothing else")
    tensor, count = files.tensors[KEY], files.settings.get("num_virtual_tokens")
    if len(tensor.shape) != 2 or 0 in tensor.shape or (count is not None and count != tensor.shape[0]):
        raise AdapterInvalidError(
            f"{KEY} has shape {tensor.shape}, {CONFIG} sets num_virtual_tokens to {str(count)[:40]}"
        )
    files.options.bounds.check_elements(tensor.shape[0] * tensor.shape[1])
    return decode(KEY, tensor)
