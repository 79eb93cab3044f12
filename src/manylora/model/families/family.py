"""ModelFamily: how to read an architecture's config.json, and the names of its checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from manylora.config.model import ModelConfig

BLOCK_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class TensorNames:
    """The names of a checkpoint's tensors, without `.weight` and `.bias`. The defaults are Llama's.

    All names except `head` are below a root. The names of a layer's parts are also below `layers`.N. An
    encoder-decoder model has two sets of names, one for each stack. An empty name: there is no such tensor.
    """

    roots: tuple[str, ...] = ("model.",)  # possible prefixes; the first one in the checkpoint is used
    unused: tuple[str, ...] = ()  # prefixes of tensors that are not loaded, such as a vision tower's
    head: str = "lm_head"
    head_layer: str = ""  # the layer of `ModelConfig.head_layer`, with or without a root
    head_norm: str = ""  # its norm
    project: str = ""  # an encoder's linear layer after its embedding
    embed: str = "embed_tokens"  # of a stack: its own table, if the stacks do not share one
    positions: str = ""  # learned positions
    relative: str = ""  # the table of relative positions (T5, MPNet)
    embedding_norm: str = ""  # before the first layer
    norm: str = "norm"  # after the last layer
    layers: str = "layers"
    # Three names, or that of a fused tensor, whose rows are in `ModelConfig.qkv_groups` groups of q, k, v.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    # Norms of queries and keys. If each head has its own tensor, `{}` stands for its number.
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = ""  # attention sinks, one number per head
    scalar: str = ""  # a number that the layer's output is multiplied by
    cross: tuple[str, ...] = ()  # q, k, v and out of cross-attention
    # Latent attention: q_b_proj and kv_b_proj. Then qkv is q_a_proj (or q_proj) and kv_a_proj_with_mqa, and
    # q_norm and k_norm apply between the two.
    latent: tuple[str, ...] = ()
    shared_block: str = "shared_expert"  # the shared expert, below `sparse`
    # Possible names, below `sparse`, of the bias that is added to the router's scores.
    corrections: tuple[str, ...] = ("gate.e_score_correction_bias",)
    # The recurrent block, in the place of attention. Below it are conv1d, A_log, dt_bias and norm.
    recurrent: str = "linear_attn"
    # Its input matrices: [q; k; v; z] and [b; a], with rows in groups of key heads; or [q; k; v], z, b and a.
    recurrent_in: tuple[str, ...] = ()
    recurrent_out: str = "out_proj"
    # Two names; or one: a fused [gate; up], or the matrix of an MLP without a gate.
    up_gate: tuple[str, ...] = ("mlp.up_proj", "mlp.gate_proj")
    down: str = "mlp.down_proj"
    # A layer's mixture of experts. Below it are a router, `experts`.N, and optionally `shared_block` and
    # `shared_expert_gate`. Empty: these are below the layer.
    sparse: str = "mlp"
    expert_up_gate: tuple[str, str] = ("up_proj", "gate_proj")  # below each expert
    expert_down: str = "down_proj"
    routers: tuple[str, ...] = ("gate",)  # possible names
    shared: tuple[str, ...] = ()  # an ungated shared expert, below the layer: fused [gate; up], and down
    # From our names (attention_norm, attention_post_norm, mlp_norm, mlp_post_norm, cross_norm) to the
    # checkpoint's. Norms that the family does not have are missing.
    block_norms: Mapping[str, str] = field(default_factory=lambda: BLOCK_NORMS)


def text_tower(names: TensorNames, others: tuple[str, ...] = ()) -> TensorNames:
    """The names of the text model inside a vision-language model. The roots cover four layouts: the released
    files, transformers from 4.52 on, a model saved without its head, and a separate text model. others:
    prefixes of further parts of the model."""
    parts = ("vision_tower.", "multi_modal_projector.", "image_newline", *others)
    return replace(
        names,
        roots=("language_model.model.", "model.language_model.", "language_model.", "model."),
        head="language_model.lm_head",
        unused=(*parts, *(f"model.{part}" for part in parts)),
    )


@dataclass(frozen=True)
class ModelFamily:
    """One architecture. defaults: what transformers uses if config.json lacks a key, or None; `rope_theta` is
    the default_theta of its class. config: from config.json, the fields of ModelConfig that differ from
    `read_common`; raises ConfigError. names: of its tensors, or of the decoder's. rename: config.json with
    its sizes under Llama's names, before anything else reads it. encoder: names of the encoder's tensors.
    aliases: other names of keys -> those used here. rope: arguments of `read_rope`.
    """

    defaults: Mapping[str, Any]
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: Callable[[ModelConfig], TensorNames] = lambda _: TensorNames()
    rename: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    encoder: Callable[[ModelConfig], TensorNames] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json with the defaults filled in and with its sizes under Llama's names."""
        named = {name: raw[alias] for alias, name in self.aliases.items() if alias in raw}
        return self.rename({**self.defaults, **raw, **named})
