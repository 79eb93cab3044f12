"""The parts of a plain decoder, for devices that run its decode step as a single call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from manylora.config.model import ModelConfig
from manylora.kernels.compiled import GATES
from manylora.kernels.decode_step import DecoderParts, LayerParts, LinearParts
from manylora.kernels.panels import Panels
from manylora.kernels.spec import Weight
from manylora.model.altup import AltUpBlock
from manylora.model.layers import Attention, Block, LoraLinear, Mlp, Norm


def decoder_parts(
    config: ModelConfig,
    blocks: Sequence[Block | AltUpBlock],
    norm: Norm,
    head: Weight,
    head_bias: Tensor | None,
    embedding: Tensor | Panels | None,
) -> DecoderParts | None:
    """None if layers are not all attention and gated MLP with RMS norms. embedding: the table whose rows,
    only scaled, are the first layer's input.
    """
    if config.parallel_blocks or config.residual_scale != 1 or norm.bias is not None:
        return None
    if config.qkv_clip is not None or config.attention_chunk or config.unrotated_growth:
        return None
    if config.attention_gated or config.recurrent is not None:
        return None
    if config.qk_norm == "plain" or config.layer_inputs is not None or config.layer_shapes:
        return None
    layers = [_layer(block) for block in blocks]
    plain = [layer for layer in layers if layer is not None]
    if len(plain) < len(layers):
        return None
    return DecoderParts(
        embedding=embedding,
        embedding_scale=config.embedding_scale,
        layers=tuple(plain),
        norm=norm.weight,
        head=LinearParts(head, head_bias),
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        dim=config.head_dim,
        inner=config.intermediate_size,
        norm_heads=config.qk_norm == "head",
        pairs=config.rope_interleaved,
        activation=GATES.index(config.activation),
        eps=config.norm_eps,
    )


def _layer(block: Block | AltUpBlock) -> LayerParts | None:
    if isinstance(block, AltUpBlock):
        return None
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, Attention):
        return None
    if not isinstance(mlp, Mlp) or not mlp.gated or mlp.activation not in GATES or mlp.cutoff is not None:
        return None
    if attention.params.sinks is not None or attention.v_norm is not None:
        return None
    norms = {
        "attention_norm": block.attention_norm,
        "attention_post_norm": block.attention_post_norm,
        "mlp_norm": block.mlp_norm,
        "mlp_post_norm": block.mlp_post_norm,
        "q_norm": attention.q_norm,
        "k_norm": attention.k_norm,
    }
    if any(norm is not None and norm.bias is not None for norm in norms.values()):
        return None
    weights = {name: None if norm is None else norm.weight for name, norm in norms.items()}
    linears = (attention.qkv, attention.out, mlp.up_gate, mlp.down)
    qkv, out, up_gate, down = map(_linear, linears)
    return LayerParts(weights, (qkv, out, up_gate, down), attention.params, attention.rotary)


def _linear(one: LoraLinear) -> LinearParts:
    return LinearParts(one.weight, one.bias, one.targets)
