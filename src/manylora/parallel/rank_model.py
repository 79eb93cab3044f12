"""rank_config: the model that one rank runs as if it were alone: fewer heads, layers and experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from manylora.config.blocks import ConvConfig, DeltaConfig, LayerShape, Mamba2Config, RecurrentConfig
from manylora.config.model import ModelConfig
from manylora.parallel.mapping import Mapping, check_mapping, layers_of_stage

T = TypeVar("T")


def rank_config(model: ModelConfig, mapping: Mapping) -> ModelConfig:
    """Sizes of this rank's part: its heads, the width of its MLPs, the layers of its stage (numbered from 0),
    and its experts. Vocabulary and hidden size are the model's. Raises ConfigError.
    """
    check_mapping(model, mapping)
    if mapping.world_size == 1:
        return model
    tp, layers, moe = mapping.tp_size, layers_of_stage(model, mapping), model.moe
    encoder = model.encoder
    if encoder is not None:
        encoder = replace(encoder, num_layers=len(mapping.stage_layers(encoder.num_layers)))
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
        # A width that no layer uses need not be divisible.
        intermediate_size=model.intermediate_size // tp if model.mlp_layers else model.intermediate_size,
        layer_shapes=tuple(_shape(one, tp) for one in _those(model.layer_shapes, layers)),
        sliding_windows=_those(model.sliding_windows, layers),
        kv_sources=tuple(one - layers[0] for one in _those(model.kv_sources, layers)),
        sparsity=_those(model.sparsity, layers),
        unmixed_layers=_of_stage(model.unmixed_layers, layers),
        mlpless_layers=_of_stage(model.mlpless_layers, layers),
        unrotated_layers=_of_stage(model.unrotated_layers, layers),
        attention_scale=model.head_dim**-0.5 if model.attention_scale is None else model.attention_scale,
        moe=moe,
        encoder=encoder,
        recurrent=None if model.recurrent is None else _recurrent(model.recurrent, tp, layers),
    )


def _key_heads(count: int, tp: int) -> int:
    return max(1, count // tp)


def _shape(own: LayerShape, tp: int) -> LayerShape:
    heads, inner = _key_heads(own.num_kv_heads, tp), own.intermediate_size // tp
    return replace(own, num_kv_heads=heads, intermediate_size=inner)


def _recurrent(own: RecurrentConfig, tp: int, layers: Sequence[int]) -> RecurrentConfig:
    """A share of the heads or channels, so that each rank has that share of every state."""
    mine = _of_stage(own.layers, layers)
    if isinstance(own, ConvConfig):
        return replace(own, layers=mine, channels=own.channels // tp)
    if isinstance(own, Mamba2Config):
        return replace(own, layers=mine, heads=own.heads // tp, groups=max(1, own.groups // tp))
    assert isinstance(own, DeltaConfig)
    return replace(own, layers=mine, key_heads=own.key_heads // tp, value_heads=own.value_heads // tp)


def _of_stage(numbers: frozenset[int], layers: Sequence[int]) -> frozenset[int]:
    return frozenset(layers.index(number) for number in numbers if number in layers)


def _those(each: tuple[T, ...], layers: Sequence[int]) -> tuple[T, ...]:
    """For these layers, the values that a family has per layer, if it has any."""
    return tuple(each[number] for number in layers) if each else ()
