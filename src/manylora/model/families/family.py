"""Family and Names: what a family of models says of itself. Holds data and looks nothing up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manylora.config.engine import ModelConfig

__all__ = ["Family", "Names"]

BLOCK_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class Names:
    """Where a checkpoint keeps its tensors, without `.weight` and `.bias`; the defaults are Llama's.

    All but `head` lie under a root, the first of `roots` that the checkpoint has; those from `qkv` on under
    `layers`.N as well. unused: starts of names of tensors that are no part of the text model. qkv and up_gate
    name one source where the checkpoint fuses them: q, k, v in `ModelConfig.qkv_groups`, and [gate; up].
    block_norms: our names, of attention_norm, attention_post_norm, mlp_norm and mlp_post_norm, to the
    checkpoint's; a norm not named does not exist. sparse: the mixture of experts of a layer, with `gate`,
    `experts`.N, and maybe `shared_expert` and `shared_expert_gate`; expert_up_gate and expert_down lie under
    each expert.

    Of an encoder-decoder model there are two of these, one for each stack of layers, with the stack's root;
    `embed` is there where a stack's table is not the shared one. norm: empty where the last layer's output is
    taken as it is. embedding_norm: on what goes into the first layer. relative: the table of relative
    positions. cross: q, k, v and out of cross-attention, whose norm is cross_norm among the block_norms.
    """

    roots: tuple[str, ...] = ("model.",)
    unused: tuple[str, ...] = ()
    head: str = "lm_head"
    embed: str = "embed_tokens"
    positions: str = ""
    norm: str = "norm"
    layers: str = "layers"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    up_gate: tuple[str, ...] = ("mlp.up_proj", "mlp.gate_proj")
    down: str = "mlp.down_proj"
    sparse: str = "mlp"
    expert_up_gate: tuple[str, str] = ("up_proj", "gate_proj")
    expert_down: str = "down_proj"
    block_norms: Mapping[str, str] = field(default_factory=lambda: BLOCK_NORMS)
    embedding_norm: str = ""
    relative: str = ""
    cross: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """config: config.json to the fields of ModelConfig that are not as `common.read_common` reads them;
    raises ConfigError or KeyError. names: of a model of this family; beside an encoder, the decoder's. usual:
    config.json with its sizes under the usual names, before anything else reads it. encoder: its names."""

    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: Callable[[ModelConfig], Names]
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    encoder: Callable[[ModelConfig], Names] | None = None
