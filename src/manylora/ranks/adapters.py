"""AdapterSlicer: the part of each adapter that one rank holds. Its pages have the same numbers on all ranks,
so that one decides for all: with the geometry of the largest stage, and as many pages as any stage needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Mapping as Dict
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from manylora.adapters.extras import LAYER, with_extras
from manylora.adapters.geometry import CacheGeometry, Layout
from manylora.adapters.modules import LoraModule, LoraModuleId, Split, join_layers, lora_modules
from manylora.adapters.slicing import AdapterPart, rows_of_rank, slice_rows
from manylora.adapters.tensors import Adapter, FileAdapter
from manylora.config.model import ModelConfig
from manylora.errors import AdapterInvalidError
from manylora.model.families import FAMILIES
from manylora.ranks.mapping import Mapping, layers_of_stage, rank_config
from manylora.ranks.weights import key_heads, of_stack, query_heads
from manylora.request import INVOCATION, LoraExtra

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
    """Keys and values that a stage sends to the next. place: in its cache; None: only passed on."""

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
    shapes = {layer: model.of_layer(layer) for layer in sorted(needed)}
    return [
        PassedKv(layer, places.get(layer), len(key_heads(shape, mapping)), shape.head_dim)
        for layer, shape in shapes.items()
    ]


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


class AdapterSlicer:
    """agree: returns the smallest number among all ranks. held: this rank's modules, of its stage."""

    def __init__(
        self,
        model: ModelConfig,
        mapping: Mapping,
        target_modules: tuple[str, ...] = (),
        agree: Callable[[int], int] = lambda number: number,
    ) -> None:
        self._model, self._mapping, self.agree = model, mapping, agree
        self.num_ranks = mapping.world_size
        self._whole = lora_modules(model, target_modules)
        self._every = lora_modules(model), self._of_rank(())  # includes modules that are not targets
        self._local: Dict[int, LoraModule] = self._of_rank(target_modules)
        self.num_layers = len(layers_of_stage(model, mapping.at(0)))
        stages = [mapping.at(stage * mapping.tp_size) for stage in range(mapping.pp_size)]
        self.modules: Dict[int, LoraModule] = self._in_stages(stages)
        self.held: Dict[int, LoraModule] = self._in_stages([mapping])
        names = FAMILIES[model.architecture].names(model)
        self._qk_norms = {names.q_norm: (query_heads, model.num_heads)}
        self._qk_norms[names.k_norm] = (key_heads, model.num_kv_heads)

    def _of_rank(self, target_modules: tuple[str, ...]) -> dict[int, LoraModule]:
        """One rank's modules, independent of its stage, with the layers of the whole model."""
        mapping = self._mapping
        tp = mapping.tp_size
        of_layer = Mapping(tp, mapping.tp_rank, tp, moe_ep_size=mapping.moe_ep_size)
        found = lora_modules(rank_config(self._model, of_layer), target_modules)
        router = LoraModuleId.MOE_ROUTER  # the router chooses among the experts of all ranks
        return {**found, router: lora_modules(self._model)[router]} if router in found else found

    def _in_stages(self, stages: Sequence[Mapping]) -> dict[int, LoraModule]:
        """A rank's modules, with the layers of a stage: on each the largest of these stages."""
        found: dict[int, dict[int, LoraModule]] = {}
        for mapping in stages:
            for module_id, module in self._local.items():
                for layer in filter(module.is_on, range(self._model.num_layers)):
                    place = place_in_stage(self._model, mapping, module_id, layer)
                    if place is not None:
                        own, forms = module.at(layer), found.setdefault(module_id, {})
                        forms[place] = max(
                            forms.get(place, own), own, key=lambda one: one.in_dim + one.out_dim
                        )
        count = self.num_layers if len(stages) > 1 else len(layers_of_stage(self._model, stages[0]))
        return {module_id: join_layers(forms, count) for module_id, forms in sorted(found.items())}

    def slice(self, adapter: Adapter | FileAdapter) -> AdapterPart:
        """This rank's rows and extras, with layers counted from its stage's first. Needs values in memory."""
        if isinstance(adapter, AdapterPart):
            return adapter
        assert isinstance(adapter, Adapter), "readers of several ranks read values"
        mapping = self._mapping
        ranks = mapping.tp_size, mapping.tp_rank
        place = partial(place_in_stage, self._model, mapping)
        rows = slice_rows(adapter.rows, self._whole, self._local, *ranks, place)
        return AdapterPart(adapter.digest, tuple(rows), self._extras(adapter, mapping))

    def layout(self, adapter: Adapter | FileAdapter, geometry: CacheGeometry, element_bytes: int) -> Layout:
        """Layout of this rank's part, with as many pages as on every rank. Raises AdapterInvalidError."""
        mapping, sizes = self._mapping, (geometry, element_bytes)
        if isinstance(adapter, AdapterPart):
            shapes, extras, pages = adapter.shapes(self.held), adapter.extras, adapter.num_pages
            mine = with_extras(Layout.of(shapes, *sizes), extras, geometry)
        else:
            # The first rank of a stage has everything that the stage's other ranks have.
            stages = [mapping.at(stage * mapping.tp_size) for stage in range(mapping.pp_size)]
            pages = max(self._layout(adapter, one, *sizes).num_pages for one in stages)
            mine = self._layout(adapter, mapping, *sizes)
        return replace(mine, used_slots=mine.used_slots + (0,) * (pages - mine.num_pages))

    def _layout(
        self, adapter: Adapter | FileAdapter, mapping: Mapping, geometry: CacheGeometry, element_bytes: int
    ) -> Layout:
        place = partial(place_in_stage, self._model, mapping)
        shapes = [
            shape._replace(layer=number)
            for shape in adapter.shapes(self._local)
            if (number := place(shape.module.module_id, shape.layer)) is not None
        ]
        layout = Layout.of(shapes, geometry, element_bytes)
        return with_extras(layout, self._extras(adapter, mapping), geometry)

    def _extras(self, adapter: Adapter | FileAdapter, mapping: Mapping) -> tuple[LoraExtra, ...]:
        found = (self._extra(extra, mapping) for extra in adapter.extras)
        return tuple(sorted((one for one in found if one is not None), key=lambda extra: extra.name))

    def _extra(self, extra: LoraExtra, mapping: Mapping) -> LoraExtra | None:
        """A rank's part. Those of embedding and head are complete on every rank of their stage."""
        found = LAYER.match(extra.name)
        if extra.name == INVOCATION:
            return extra
        if found is None:
            part = of_stack(extra.name).partition(".")[0]
            last = part in ("norm", "head")  # scores are computed on rank 0
            tied = extra.name == "embed.tokens" and self._model.tie_word_embeddings
            here = (mapping.is_first_stage and not last) or (mapping.is_last_stage and (last or tied))
            return extra if here else None
        layer, rest = int(found[1]), extra.name[found.end() :]
        owner = next(
            (n for n, module in self._every[0].items() if module.name == rest.rpartition(".")[0]), -1
        )
        number = place_in_stage(self._model, mapping, owner, layer)
        values = None if number is None else self._of_layer(rest, extra.values, mapping, owner, layer)
        return None if values is None else LoraExtra(f"layers.{number}.{rest}", values, extra.token_ids)

    def _of_layer(
        self, name: str, values: np.ndarray, mapping: Mapping, number: int, layer: int
    ) -> np.ndarray | None:
        """name: of an extra, within its layer. number: of its module; -1: none."""
        owner, _, kind = name.rpartition(".")
        model = self._model.of_layer(layer)
        tp, rank = mapping.tp_size, mapping.tp_rank
        if owner in self._qk_norms and self._model.qk_norm in ("all", "each"):
            share, count = self._qk_norms[owner]
            heads = share(model, mapping)
            return values.reshape(count, -1)[heads.start : heads.stop].reshape(-1)
        if owner == "prefix":
            heads = key_heads(model, mapping)
            shaped = values.reshape(len(values), model.num_kv_heads, -1)
            return np.ascontiguousarray(shaped[:, heads.start : heads.stop]).reshape(len(values), -1)
        if number < 0:
            return values
        module, local = (those[number].at(layer) for those in self._every)
        if kind == "input_scale":
            cut = module.split is Split.A_COLS and module.in_dim > local.in_dim
            return values.reshape(tp, -1)[rank] if cut else values
        if kind == "input_turn":
            size, inputs = values.shape[1], local.in_dim
            if inputs % size:
                raise AdapterInvalidError(
                    f"{owner}: each rank takes {inputs} inputs of this module, which cuts blocks of {size} "
                    "apart: train with a smaller oft_block_size, or serve with fewer ranks"
                )
            cut = module.in_dim > inputs and len(values) > size
            return values.reshape(tp, -1, size)[rank] if cut else values
        if kind in ("scale", "turn"):  # applies to a partial sum as to the sum
            if module.split is not Split.B_ROWS:
                return values
            rows = rows_of_rank(module, local, tp, rank)
            if values.ndim == 1:
                return values[rows]
            size = values.shape[1]
            if len(rows) % size or (rows.reshape(-1, size) % size != np.arange(size)).any():
                raise AdapterInvalidError(
                    f"{owner}: each rank has {len(rows)} outputs of this module, which cuts groups of {size} "
                    "apart: train with a smaller group_size, or serve with fewer ranks"
                )
            return values.reshape(-1)[rows].reshape(-1, size)
        if kind != "bias":
            return values
        # Its outputs are summed over ranks, so only one rank adds the bias.
        if module.split is Split.A_COLS or number == LoraModuleId.MOE_LATENT_FC2:
            return values if rank == 0 else None
        return values[rows_of_rank(module, local, tp, rank)] if module.split is Split.B_ROWS else values
