"""rank_config: the model that one rank runs, as if there were no others: fewer heads, layers and experts."""

from __future__ import annotations

from dataclasses import replace

from manylora.config.blocks import ConvConfig, DeltaConfig, LayerShape, Mamba2Config, RecurrentConfig
from manylora.config.engine import ModelConfig
from manylora.parallel.mapping import Mapping, check_mapping


def rank_config(model: ModelConfig, mapping: Mapping) -> ModelConfig:
    """The sizes of this rank's part: its heads, the width of its MLPs, and the layers of its stage, numbered
    from 0, and its experts. Vocabulary and hidden size stay the model's. Raises ConfigError."""
    check_mapping(model, mapping)
    if mapping.world_size == 1:
        return model
    tp, layers, moe = mapping.tp_size, mapping.stage_layers(model.num_layers), model.moe
    if moe is not None:
        moe = replace(
            moe,
            num_experts=len(mapping.experts(moe.num_experts)),
            intermediate_size=moe.intermediate_size // mapping.moe_tp_size,
            shared_intermediate_size=moe.shared_intermediate_size // tp,
            layers=_of_stage(moe.layers, layers),
        )
    return replace(
        model,
        num_layers=len(layers),
        num_heads=model.num_heads // tp,
        num_kv_heads=_key_heads(model.num_kv_heads, tp),
        # A width that no layer has need not be divisible.
        intermediate_size=model.intermediate_size // tp if model.mlp_layers else model.intermediate_size,
        layer_shapes=tuple(_shape(one, tp) for one in model.layer_shapes[layers.start : layers.stop]),
        sliding_windows=model.sliding_windows[layers.start : layers.stop],
        kv_sources=tuple(one - layers.start for one in model.kv_sources[layers.start : layers.stop]),
        sparsity=model.sparsity[layers.start : layers.stop],
        unmixed_layers=_of_stage(model.unmixed_layers, layers),
        mlpless_layers=_of_stage(model.mlpless_layers, layers),
        unrotated_layers=_of_stage(model.unrotated_layers, layers),
        attention_scale=model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale,
        moe=moe,
        recurrent=None if model.recurrent is None else _recurrent(model.recurrent, tp, layers),
    )


def _key_heads(count: int, tp: int) -> int:
    return max(1, count // tp)


def _shape(own: LayerShape, tp: int) -> LayerShape:
    heads, inner = _key_heads(own.num_kv_heads, tp), own.intermediate_size // tp
    return replace(own, num_kv_heads=heads, intermediate_size=inner)


def _recurrent(own: RecurrentConfig, tp: int, layers: range) -> RecurrentConfig:
    """A share of the heads or channels, so that each rank has that share of every state."""
    mine = _of_stage(own.layers, layers)
    if isinstance(own, ConvConfig):
        return replace(own, layers=mine, channels=own.channels // tp)
    if isinstance(own, Mamba2Config):
        return replace(own, layers=mine, heads=own.heads // tp, groups=max(1, own.groups // tp))
    assert isinstance(own, DeltaConfig)
    return replace(own, layers=mine, key_heads=own.key_heads // tp, value_heads=own.value_heads // tp)


def _of_stage(numbers: frozenset[int], layers: range) -> frozenset[int]:
    return frozenset(number - layers.start for number in numbers if number in layers)
