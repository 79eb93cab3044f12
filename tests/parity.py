"""The kinds of PEFT adapters that models are compared with transformers + PEFT under, made by layer names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driver import Tensors
from tiny_models import make_adapter, read_adapter_folder

from manylora.adapters.formats.base_weights import BaseWeights
from manylora.adapters.modules import lora_modules
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.model import ModelConfig
from manylora.model.checkpoint import read_model_config
from manylora.model.families import FAMILIES as ARCHITECTURES
from manylora.model.quant import EffectiveWeights


class LayerNames(NamedTuple):
    """The last parts of a model's module names, as used in PEFT's settings.

    linears: the linear layers of a block, attention's first. layers: the list of blocks.
    """

    linears: tuple[str, ...]
    layers: str
    embedding: str
    norms: tuple[str, ...]


# Kinds of PEFT adapters. Each function returns the arguments of `make_adapter` for a model's layer names.
KINDS: dict[str, Callable[[LayerNames], dict[str, Any]]] = {
    "LoRA": lambda _: {"rank": 5},
    "rank 1": lambda _: {"rank": 1},
    "rank 64": lambda names: {"rank": 64, "modules": (names.linears[0], names.linears[-1])},
    "patterns": lambda names: {"rank": 4, **_patterns(names)},
    "some layers": lambda names: {"rank": 6, "layers_to_transform": [1], "layers_pattern": names.layers},
    "rsLoRA": lambda names: {"rank": 9, "use_rslora": True, "rank_pattern": {names.linears[-1]: 2}},
    "DoRA": lambda _: {"rank": 6, "use_dora": True},
    "DoRA + rsLoRA + patterns": lambda names: {
        "rank": 3,
        "use_dora": True,
        "use_rslora": True,
        **_patterns(names),
    },
    "bias": lambda names: {"rank": 4, "bias": "all", "modules": names.linears[1:]},
    "lora_bias": lambda _: {"rank": 4, "lora_bias": True},
    "DoRA + bias": lambda _: {"rank": 4, "bias": "lora_only", "use_dora": True},
    "embedding": lambda names: {"rank": 4, "modules": (names.linears[0], names.embedding)},
    "lm_head": lambda names: {"rank": 4, "modules": (names.linears[0], "lm_head")},
    "both + DoRA": lambda names: {
        "rank": 4,
        "modules": (names.linears[0], names.embedding, "lm_head"),
        "use_dora": True,
    },
    "modules_to_save": lambda names: {"rank": 4, "modules_to_save": [names.embedding, "lm_head"]},
    "norms saved": lambda names: {"rank": 4, "modules_to_save": list(names.norms)},
    "token indices": lambda _: {"rank": 4, "trainable_token_indices": list(range(248, 0, -3))},
}
LAYER_INPUTS = ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection")
ALTUP = ("modality_router", "prediction_coefs", "correction_coefs", "linear_left", "linear_right")
ALTUP_ENDS = ("altup_projections", "altup_unembed_projections")
WITHOUT_OUT = ("NemotronHForCausalLM", "FalconH1ForCausalLM")  # PEFT refuses out_proj there


def _patterns(names: LayerNames) -> dict[str, Any]:
    first, last, layers = names.linears[0], names.linears[-1], names.layers
    return {
        "rank_pattern": {first: 3, rf"{layers}\.1\..*{last}": 17},
        "alpha_pattern": {last: 1, f"{layers}.0.*{first}": 30},
    }


def linear_names(model: ModelConfig) -> LayerNames:
    """The names of the model's linear layers and norms, from its family."""
    family = ARCHITECTURES[model.architecture]
    names = family.names(model)
    stacks = [names] if family.encoder is None else [names, family.encoder(model)]
    norms = [n for s in stacks for n in (s.norm, s.embedding_norm, *s.block_norms.values()) if n]
    inner = model.latent or model.qk_norm not in ("", "plain")
    norms += [n for n in (names.q_norm, names.k_norm) if inner and "{}" not in n]
    linears = (*names.qkv, *names.latent, names.out, *names.up_gate, names.down)
    if (
        model.moe is not None
    ):  # PEFT would also match the experts with an MLP's names; other tests cover experts
        linears = linears[: -len(names.up_gate) - 1]
    if model.recurrent is not None:
        linears += names.recurrent_in
        if model.architecture not in WITHOUT_OUT:
            linears += (names.recurrent_out,)
    if model.layer_inputs is not None:
        norms += ["post_per_layer_input_norm", "per_layer_projection_norm"]
        linears = (linears[0], *LAYER_INPUTS, *linears[1:])
    if model.altup is not None:
        norms += ["router_norm", "post_laurel_norm"]
        ends = [f"{end}.{n}" for end in ALTUP_ENDS for n in range(model.altup.streams - 1)]
        own = LayerNames(_last_parts(linears), names.layers, names.embed, _last_parts(norms))
        return own._replace(linears=(own.linears[0], *ALTUP, *ends, *own.linears[1:]))
    return LayerNames(_last_parts(linears), names.layers, names.embed, _last_parts(norms))


def _last_parts(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))


def make_kind(path: Path, model_dir: Path, kind: str, seed: int) -> Path:
    """A PEFT adapter of one of KINDS, on all linear layers unless the kind says otherwise."""
    names = linear_names(read_model_config(model_dir))
    return make_adapter(path, model_dir, seed, **{"modules": names.linears, **KINDS[kind](names)})


def read_from(adapter: Path, model_dir: Path, quant: QuantConfig | None = None) -> Tensors:
    """A PEFT adapter's tensors. quant: how the base model is quantised at load time. Raises
    AdapterInvalidError.
    """
    config = read_model_config(model_dir)
    base = BaseWeights(model_dir, EffectiveWeights(config, quant))
    return read_adapter_folder(adapter, base, lora_modules(config))
