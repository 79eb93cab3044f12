"""CudaOps: operations on a CUDA device, with PyTorch's GEMM and kernels in the Triton language."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from manylora.kernels.cuda import launch, lora, recurrent, routing, rows
from manylora.kernels.cuda.arithmetic import is_interpreted
from manylora.kernels.cuda.attention import paged_attention
from manylora.kernels.cuda.grouped import (
    ALIGNMENTS,
    QuantisedLinears,
    WeightTable,
    fits_fp8_units,
    grouped_linear,
    weight_table,
)
from manylora.kernels.cuda.plan import MODULES, PLACE, Places
from manylora.kernels.cuda.tables import PART_KEYS, PagedBatch, PlannedLora, plan_attention, plan_lora
from manylora.kernels.quantised import QuantisedWeight, StackedWeight
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import (
    AttentionBatch,
    AttentionParams,
    BatchLimits,
    ExpertPairs,
    LoraBatch,
    LoraTarget,
    Targets,
    Weight,
)
from manylora.kernels.transfer import upload

SPARE_SLOTS = 64  # slots kept for adapters without running sequences
LARGEST_HEAD = 512  # elements; attention of wider heads uses PyTorch


class CudaOps(ReferenceOps):
    """No operation waits for the device. Under the interpreter, tensors may be on the host.

    part_keys: minimum keys of one program in decode attention.
    """

    reads_tables = False

    def __init__(self, part_keys: int = PART_KEYS) -> None:
        self._part_keys = part_keys
        self._quantised = QuantisedLinears()
        self._targets: dict[tuple[LoraTarget, ...], Tensor] = {}
        self._tables: dict[int, tuple[Sequence[Weight], WeightTable]] = {}
        self._last_plan: tuple[tuple[LoraBatch, int, bool] | None, PlannedLora | None] = None, None

    def reserve(self, limits: BatchLimits, device: torch.device) -> None:
        slots = limits.max_sequences + SPARE_SLOTS
        self._limits = limits
        self._host_places = Places(slots, limits.num_layers)
        self._last_plan = None, None
        shape = (slots, limits.num_layers, MODULES, PLACE)
        self._places = torch.zeros(shape, dtype=torch.int64, device=device)
        # Accumulate parts of a product in float32, so that a row of the base model does not depend on how
        # torch splits the product. By default torch rounds them.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def compiling(self) -> AbstractContextManager[bool]:
        return super().compiling() if is_interpreted() else launch.compiling()

    def plan(
        self, attention: AttentionBatch, lora: LoraBatch | None, fixed: bool = False
    ) -> tuple[PagedBatch, PlannedLora | None]:
        paged = plan_attention(attention, self._limits, fixed, self._part_keys)
        if lora is None:
            return paged, None
        num_rows = len(attention.slots)
        known, planned = self._last_plan
        if known is not None and known[0] is lora and known[1:] == (num_rows, fixed):  # in consecutive steps
            return paged, planned
        routed = bool(self._limits.num_experts)
        tables, updates = plan_lora(lora, self._host_places, num_rows, fixed, routed)
        self._make_room(self._host_places.num_slots)
        for slot, places in updates:
            self._places[slot].copy_(upload(places, torch.int64, self._places.device))
        planned = replace(tables, places=self._places)
        self._last_plan = (lora, num_rows, fixed), planned
        return paged, planned

    def _make_room(self, slots: int) -> None:
        """Steps in flight and recorded steps keep using their tables."""
        known = self._places
        if slots > len(known):
            self._places = known.new_zeros((slots, *known.shape[1:]))
            self._places[: len(known)] = known

    def pack(self, weight: Tensor | QuantisedWeight | StackedWeight, routed: bool = False) -> Weight:
        if isinstance(weight, StackedWeight):
            return weight.map(self.pack)
        if isinstance(weight, Tensor):
            return weight
        plain = weight.without_codes()  # no kernel here supports codebooks
        if isinstance(plain, Tensor):
            return plain
        weight = plain
        if routed:  # the experts' kernel supports neither zeros nor orders
            return weight if weight.is_plain else weight.wide()
        return self._quantised.pack(weight)

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(packed, QuantisedWeight):
            return self._quantised(x, packed, bias)
        return super().linear(x, packed, bias)

    def lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, layer: int, targets: Targets, bias: Tensor | None = None
    ) -> None:
        assert isinstance(batch, PlannedLora), "a batch goes through `plan` first"
        tables = self._tables_of(x, batch, layer, targets, batch.tiles, batch.tile_size)
        if tables is not None:
            lora.expand_add(y, lora.shrink(x, tables), x.shape[1], tables, bias)

    def pair_up(
        self, choices: Tensor, num_experts: int, lora: LoraBatch | None
    ) -> tuple[ExpertPairs, Tensor]:
        assert lora is None or isinstance(lora, PlannedLora), "a batch goes through `plan` first"
        return routing.pair_up(choices, num_experts, lora)

    def expert_linear(self, x: Tensor, pairs: ExpertPairs, weights: Sequence[Weight]) -> Tensor:
        assert isinstance(pairs, routing.DevicePairs)
        return grouped_linear(x, pairs.tiles, pairs.tile_size, self._weight_table(weights))

    def expert_lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, pairs: ExpertPairs, layer: int, targets: Targets
    ) -> None:
        assert isinstance(batch, PlannedLora) and isinstance(pairs, routing.DevicePairs)
        tables = self._tables_of(x, batch, layer, targets, pairs.lora_tiles, pairs.lora_tile_size)
        if tables is not None:
            lora.expand_add(y, lora.shrink(x, tables), x.shape[1], tables, None)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, params: AttentionParams
    ) -> Tensor:
        # Latent attention, or chunks of sequences, which the plan does not cover.
        if q.shape[-1] > LARGEST_HEAD or not isinstance(batch, PagedBatch):
            return super().attention(q, k_cache, v_cache, batch, params)
        return paged_attention(q, k_cache, v_cache, batch, params)

    rotate_and_store = staticmethod(rows.rotate_and_store)
    delta_rule = staticmethod(recurrent.delta_rule)
    mamba2 = staticmethod(recurrent.mamba2)
    short_conv = staticmethod(recurrent.short_conv)
    rms_norm = staticmethod(rows.rms_norm)
    add_rms_norm = staticmethod(rows.add_rms_norm)
    gated = staticmethod(rows.gated)
    clamped_swiglu = staticmethod(rows.clamped_swiglu)

    def _tables_of(
        self, x: Tensor, batch: PlannedLora, layer: int, targets: Targets, tiles: Tensor, tile_size: int
    ) -> lora.LoraTables | None:
        """None: no adapter in the batch has any of these modules."""
        present = tuple(target for target in targets if target.module_id in batch.kinds.modules)
        if not present:
            return None
        in_dim = x.shape[1]
        common = math.gcd(batch.alignment, in_dim, *(t.start for t in present), *(t.width for t in present))
        return lora.LoraTables(
            pool=batch.pool,
            places=batch.places,
            tiles=tiles,
            targets=self._target_table(present, x.device),
            layer=layer,
            tile_size=tile_size,
            align=next(size for size in ALIGNMENTS if common % size == 0),
            kinds=batch.kinds,
        )

    def _target_table(self, targets: tuple[LoraTarget, ...], device: torch.device) -> Tensor:
        """[targets, 3] int32 on the device, created once per kind of linear layer."""
        if targets not in self._targets:
            values = [(t.module_id, t.start, t.width) for t in targets]
            self._targets[targets] = torch.tensor(values, dtype=torch.int32, device=device)
        return self._targets[targets]

    def _weight_table(self, weights: Sequence[Weight]) -> WeightTable:
        """Created once for the experts of a layer. It holds the weights, so that their ids are not reused."""
        known = self._tables.get(id(weights))
        if known is None:
            one = weights[0]
            narrow = isinstance(one, QuantisedWeight) and fits_fp8_units(one)
            known = self._tables[id(weights)] = weights, weight_table(weights, narrow)
        return known[1]
