"""What stages have besides their own layers: rows of adapters, and keys and values of other layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manylora.config.model import ModelConfig
from manylora.lora.modules import LoraModuleId
from manylora.parallel.mapping import Mapping, layers_of_stage
from manylora.parallel.weights import key_heads

# Modules outside of the layers, whose rows have layer numbers nevertheless.
BEFORE_LAYERS = (
    LoraModuleId.PER_LAYER_MODEL_PROJECTION,
    LoraModuleId.ALTUP_PROJECTIONS,
    LoraModuleId.PROJECT_IN,
)
BEHIND_LAYERS = (LoraModuleId.ALTUP_UNEMBED_PROJECTIONS, LoraModuleId.PROJECT_OUT)


def place_in_stage(model: ModelConfig, mapping: Mapping, module_id: int, layer: int) -> int | None:
    """The number of this layer's row of a module within a stage. None: it is in another stage."""
    if module_id in BEFORE_LAYERS:
        return layer if mapping.is_first_stage else None
    if module_id in BEHIND_LAYERS:
        return layer if mapping.is_last_stage else None
    layers = layers_of_stage(model, mapping)
    return layers.index(layer) if layer in layers else None


@dataclass(frozen=True)
class PassedKv:
    """Keys and values of a layer that a stage receives from the previous one or sends to the next.

    place: index in its cache; None: it only passes them on. heads, dim: per token.
    """

    layer: int
    place: int | None
    heads: int
    dim: int


def kv_from_before(model: ModelConfig, mapping: Mapping) -> list[PassedKv]:
    """For layers of earlier stages that this stage or a later one reads."""
    layers = mapping.stage_layers(model.num_layers)
    own = [n for n in layers if n in model.attention_layers and n not in model.kv_readers]
    here = sorted(
        {source for source in model.kv_sources[layers.start : layers.stop] if source < layers.start}
    )
    places = {layer: place for place, layer in enumerate([*own, *here])}
    needed = {source for source in model.kv_sources[layers.start :] if source < layers.start}
    return [_passed(model, mapping, layer, places.get(layer)) for layer in sorted(needed)]


def kv_for_next(model: ModelConfig, mapping: Mapping) -> list[PassedKv]:
    """The result of `kv_from_before` for the next stage, with indices in this one."""
    if mapping.is_last_stage:
        return []
    layers = mapping.stage_layers(model.num_layers)
    own = [n for n in layers if n in model.attention_layers and n not in model.kv_readers]
    places = {layer: place for place, layer in enumerate(own)}
    places |= {one.layer: one.place for one in kv_from_before(model, mapping) if one.place is not None}
    following = kv_from_before(model, mapping.at(mapping.rank + mapping.tp_size))
    return [replace(one, place=places.get(one.layer)) for one in following]


def _passed(model: ModelConfig, mapping: Mapping, layer: int, place: int | None) -> PassedKv:
    of_layer = model.of_layer(layer)
    return PassedKv(layer, place, len(key_heads(of_layer, mapping)), of_layer.head_dim)
