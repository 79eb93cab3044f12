"""ModelFamily: how to read an architecture's config.json, and the names of its checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from manylora.config.engine import ModelConfig

BLOCK_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class TensorNames:
    """The names of a checkpoint's tensors, without `.weight` and `.bias`. The defaults are Llama's.

    All but `head` are below a root; those from `qkv` to `block_norms` are below `layers`.N too. An
    encoder-decoder model has two sets of names, one for each stack of layers.

    roots: prefixes; the first one that occurs in the checkpoint counts.
    unused: prefixes of tensors that are not loaded, as those of a vision tower.
    head_layer: of `ModelConfig.head_layer`: with a root or without. head_norm: its norm.
    embed: of an encoder-decoder model, the stack's own table where it does not share one.
    positions: the learned positions. relative: T5's table of relative positions.
    embedding_norm: on the input of the first layer. norm: on the output of the last; empty: there is none.
    qkv: three names, or one of a fused tensor, whose rows are in `ModelConfig.qkv_groups` groups of q, k, v.
    up_gate: two names, one of a fused [gate; up], or one of an MLP without a gate.
    sparse: the mixture of experts of a layer (empty: it has no name of its own), which has a router,
        `experts`.N and perhaps `shared_expert` and `shared_expert_gate`. expert_up_gate, expert_down: below
        each expert. routers: names that a router may have. shared: of a shared expert without a gate, fused
        [gate; up] and down, below the layer.
    block_norms: from our names (attention_norm, attention_post_norm, mlp_norm, mlp_post_norm, cross_norm) to
        the checkpoint's; norms that the family does not have are left out.
    q_norm, k_norm: with `{}` for the number of a head, where each has a tensor of its own.
    sinks: one number for each head. scalar: one number for a layer, which its output is multiplied by.
    cross: q, k, v and out of cross-attention.
    latent: of latent attention, whose qkv are q_a_proj (or q_proj) and kv_a_proj_with_mqa: q_b_proj and
        kv_b_proj. q_norm and k_norm are of the vectors between these.
    shared_block: the shared expert, below `sparse`. corrections: names that what is added to a
        router's scores may have there.
    recurrent: what a recurrent layer has in attention's place, with conv1d, A_log, dt_bias and norm.
    recurrent_in: below it, the matrices of [q; k; v; z] and of [b; a]: two, whose rows are in groups of key
        heads, or [q; k; v], z, b and a. recurrent_out: the matrix of its output.
    """

    roots: tuple[str, ...] = ("model.",)
    unused: tuple[str, ...] = ()
    head: str = "lm_head"
    head_layer: str = ""
    head_norm: str = ""
    embed: str = "embed_tokens"
    positions: str = ""
    relative: str = ""
    embedding_norm: str = ""
    norm: str = "norm"
    layers: str = "layers"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = ""
    scalar: str = ""
    cross: tuple[str, ...] = ()
    latent: tuple[str, ...] = ()
    shared_block: str = "shared_expert"
    corrections: tuple[str, ...] = ("gate.e_score_correction_bias",)
    recurrent: str = "linear_attn"
    recurrent_in: tuple[str, ...] = ()
    recurrent_out: str = "out_proj"
    up_gate: tuple[str, ...] = ("mlp.up_proj", "mlp.gate_proj")
    down: str = "mlp.down_proj"
    sparse: str = "mlp"
    expert_up_gate: tuple[str, str] = ("up_proj", "gate_proj")
    expert_down: str = "down_proj"
    routers: tuple[str, ...] = ("gate",)
    shared: tuple[str, ...] = ()
    block_norms: Mapping[str, str] = field(default_factory=lambda: BLOCK_NORMS)


def text_tower(names: TensorNames) -> TensorNames:
    """Of the text model of one that sees images too: as it was released, as transformers saves it from 4.52
    on, as it saves the model without its head, and as a text model of its own."""
    parts = ("vision_tower.", "multi_modal_projector.", "image_newline")
    return replace(
        names,
        roots=("language_model.model.", "model.language_model.", "language_model.", "model."),
        head="language_model.lm_head",
        unused=(*parts, *(f"model.{part}" for part in parts)),
    )


@dataclass(frozen=True)
class ModelFamily:
    """One architecture.

    defaults: what transformers takes for a key that config.json lacks, for each key that is read;
        `rope_theta` is the default_theta of its class. Where it takes nothing (head_dim of most), None.
    config: from config.json, defaults filled in, to the fields of ModelConfig, where they differ from what
        `common.read_common` reads. Raises ConfigError.
    names: of the tensors, if not Llama's; of an encoder-decoder model, the decoder's.
    rename: config.json with its sizes under Llama's names, before anything else reads it.
    encoder: names of the encoder's tensors; None: a decoder-only model.
    aliases: other names that a key may have in config.json.
    rope: how `common.read_rope` is called: the names of keys, and what is rotated.
    """

    defaults: Mapping[str, Any]
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: Callable[[ModelConfig], TensorNames] = lambda _: TensorNames()
    rename: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    encoder: Callable[[ModelConfig], TensorNames] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json with the defaults filled in, and sizes under Llama's names."""
        named = {name: raw[alias] for alias, name in self.aliases.items() if alias in raw}
        return self.rename({**self.defaults, **raw, **named})
