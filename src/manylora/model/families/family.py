"""Family and Names: what a family of models says of itself. Holds data and looks nothing up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manylora.config import ModelConfig

__all__ = ["Family", "Names"]

BLOCK_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class Names:
    """Where a checkpoint keeps its tensors, without `.weight` and `.bias`; the defaults are Llama's.

    All but `head` lie under `root`; those from `qkv` on under `layers`.N as well. qkv and up_gate name one
    source where the checkpoint fuses them: q, k, v in `ModelConfig.qkv_groups`, and [gate; up]. block_norms:
    our names, of attention_norm, attention_post_norm, mlp_norm and mlp_post_norm, to the checkpoint's; a norm
    not named does not exist.
    """

    root: str = "model."
    root_optional: bool = False  # some releases leave the root out
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
    block_norms: Mapping[str, str] = field(default_factory=lambda: BLOCK_NORMS)


@dataclass(frozen=True)
class Family:
    """config: config.json to the fields of ModelConfig that are not as `common.read_common` reads them;
    raises ConfigError or KeyError. names: of a model of this family. usual: config.json with its sizes under
    the usual names, before anything else reads it."""

    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: Callable[[ModelConfig], Names]
    usual: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
