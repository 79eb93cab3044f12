"""AdapterSlicer: what one rank holds of each adapter.

The pages of an adapter have the same numbers on every rank, so one rank decides for all: the geometry of
pages is that of the largest stage on all of them, and an adapter takes as many pages as its part of any stage
does.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Dict
from dataclasses import replace

import numpy as np

from manylora.config.engine import ModelConfig
from manylora.errors import AdapterInvalidError
from manylora.lora.extras import HEAD, LAYER, with_extras
from manylora.lora.file_adapter import FileAdapter
from manylora.lora.geometry import CacheGeometry, Layout
from manylora.lora.modules import LoraModule, LoraModuleId, Split, lora_modules
from manylora.lora.slicing import AdapterPart, rows_of_rank, slice_rows
from manylora.lora.tensors import Adapter
from manylora.model.families import FAMILIES
from manylora.parallel.mapping import Mapping
from manylora.parallel.rank_model import rank_config
from manylora.parallel.weights import key_heads, query_heads
from manylora.request import INVOCATION, LoraExtra


class AdapterSlicer:
    """model: the whole one. target_modules: as of LoraCacheConfig. agree: the smallest number that any rank
    gives."""

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
        self._every = lora_modules(model), self._of_rank(())  # also those that adapters may not have rows for
        self.modules: Dict[int, LoraModule] = self._of_rank(target_modules)
        first = mapping.at(0)
        self.num_layers = len(first.stage_layers(model.num_layers))
        names = FAMILIES[model.architecture].names(model)
        self._qk_norms = {names.q_norm: (query_heads, model.num_heads)}
        self._qk_norms[names.k_norm] = (key_heads, model.num_kv_heads)

    def _of_rank(self, target_modules: tuple[str, ...]) -> dict[int, LoraModule]:
        """One rank's modules, whatever its stage; layers as in the whole model."""
        mapping = self._mapping
        tp = mapping.tp_size
        of_layer = Mapping(tp, mapping.tp_rank, tp, moe_ep_size=mapping.moe_ep_size)
        found = lora_modules(rank_config(self._model, of_layer), target_modules)
        router = LoraModuleId.MOE_ROUTER  # it chooses among the experts of all ranks
        return {**found, router: lora_modules(self._model)[router]} if router in found else found

    def slice(self, adapter: Adapter | FileAdapter) -> AdapterPart:
        """This rank's rows and extras, layers numbered from the stage's first. The digest stays. An
        AdapterPart is returned as it is. The values must be in memory."""
        if isinstance(adapter, AdapterPart):
            return adapter
        assert isinstance(adapter, Adapter), "readers of several ranks read values"
        mapping = self._mapping
        layers = mapping.stage_layers(self._model.num_layers)
        rows = slice_rows(adapter.rows, self._whole, self.modules, mapping.tp_size, mapping.tp_rank, layers)
        extras = (self._extra(extra, mapping) for extra in adapter.extras)
        kept = sorted((e for e in extras if e is not None), key=lambda extra: extra.name)
        return AdapterPart(adapter.digest, tuple(rows), tuple(kept))

    def layout(self, adapter: Adapter | FileAdapter, geometry: CacheGeometry, element_bytes: int) -> Layout:
        """Of this rank's part, with as many pages as on every rank. Raises AdapterInvalidError."""
        mapping, sizes = self._mapping, (geometry, element_bytes)
        if isinstance(adapter, AdapterPart):
            shapes, extras, pages = adapter.shapes(self.modules), adapter.extras, adapter.num_pages
            mine = with_extras(Layout.of(shapes, *sizes), extras, geometry)
        else:
            # The first rank of a stage has all that the others of its stage have.
            stages = [mapping.at(stage * mapping.tp_size) for stage in range(mapping.pp_size)]
            pages = max(self._layout(adapter, one, *sizes).num_pages for one in stages)
            mine = self._layout(adapter, mapping, *sizes)
        return replace(mine, used_slots=mine.used_slots + (0,) * (pages - mine.num_pages))

    def _layout(
        self, adapter: Adapter | FileAdapter, mapping: Mapping, geometry: CacheGeometry, element_bytes: int
    ) -> Layout:
        layers = mapping.stage_layers(self._model.num_layers)
        shapes = [
            shape._replace(layer=layers.index(shape.layer))
            for shape in adapter.shapes(self.modules)
            if shape.layer in layers
        ]
        extras = (self._extra(extra, mapping) for extra in adapter.extras)
        kept = sorted((e for e in extras if e is not None), key=lambda extra: extra.name)
        return with_extras(Layout.of(shapes, geometry, element_bytes), kept, geometry)

    def _extra(self, extra: LoraExtra, mapping: Mapping) -> LoraExtra | None:
        """A rank's part of an extra. Those of embedding and head are whole on every rank of their stage."""
        found = LAYER.match(extra.name)
        if extra.name == INVOCATION:
            return extra
        if found is None:
            if mapping.pp_size == 1:
                return extra
            begin = extra.name.partition(".")[0]
            last = begin in ("norm", "head", HEAD)
            last = last or (extra.name == "embed.tokens" and self._model.tie_word_embeddings)
            here = (mapping.is_first_stage and begin in ("embed", "prompt")) or (
                mapping.is_last_stage and last
            )
            return extra if here else None
        layers, rest = mapping.stage_layers(self._model.num_layers), extra.name[found.end() :]
        if int(found[1]) not in layers:
            return None
        values = self._of_layer(rest, extra.values, mapping)
        if values is None:
            return None
        return LoraExtra(f"layers.{layers.index(int(found[1]))}.{rest}", values, extra.token_ids)

    def _of_layer(self, name: str, values: np.ndarray, mapping: Mapping) -> np.ndarray | None:
        """name: of an extra, below its layer."""
        owner, _, kind = name.rpartition(".")
        tp, rank = mapping.tp_size, mapping.tp_rank
        if owner in self._qk_norms and self._model.qk_norm in ("all", "each"):
            share, count = self._qk_norms[owner]
            heads = share(self._model, mapping)
            return values.reshape(count, -1)[heads.start : heads.stop].reshape(-1)
        if owner == "prefix":
            heads = key_heads(self._model, mapping)
            shaped = values.reshape(len(values), self._model.num_kv_heads, -1)
            return np.ascontiguousarray(shaped[:, heads.start : heads.stop]).reshape(len(values), -1)
        whole, locals_ = self._every
        number = next((number for number, module in whole.items() if module.name == owner), None)
        if number is None:
            return values
        module, local = whole[number], locals_[number]
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
        if kind in ("scale", "turn"):  # of a part of a sum as of the sum
            cut = module.split is Split.B_ROWS
            return _cut_groups(owner, values, rows_of_rank(module, local, tp, rank)) if cut else values
        if kind != "bias":
            return values
        if module.split is Split.A_COLS:  # its outputs are added up, so one rank adds the bias
            return values if rank == 0 else None
        return values[rows_of_rank(module, local, tp, rank)] if module.split is Split.B_ROWS else values


def _cut_groups(owner: str, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Those rows of [out] or of [groups, size]. Raises AdapterInvalidError where a group is not whole."""
    if values.ndim == 1:
        return values[rows]
    size = values.shape[1]
    if len(rows) % size or (rows.reshape(-1, size) % size != np.arange(size)).any():
        raise AdapterInvalidError(
            f"{owner}: each rank has {len(rows)} outputs of this module, which cuts groups of {size} apart: "
            "train with a smaller group_size, or serve with fewer ranks"
        )
    return values.reshape(-1)[rows].reshape(-1, size)
