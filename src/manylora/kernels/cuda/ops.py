"""CudaOps: operations on a CUDA device, with PyTorch's GEMM and kernels in the Triton language."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from manylora.kernels.cuda import kv, launch, lora, recurrent, routing, rows
from manylora.kernels.cuda.backends import AttentionBackend, choose
from manylora.kernels.cuda.blocks import IN_TURN, ORDERS, BlockChooser, Order
from manylora.kernels.cuda.capture import SecondStream, is_recording
from manylora.kernels.cuda.grouped import ALIGNMENTS, WeightTable, grouped_linear, weight_table
from manylora.kernels.cuda.plan import MODULES, PLACE, Places, plan_lora
from manylora.kernels.cuda.products import QuantisedLinears
from manylora.kernels.cuda.tables import PART_KEYS, PagedBatch, PlannedLora, plan_attention
from manylora.kernels.quantised import PackedInt4, QuantisedWeight, StackedWeight
from manylora.kernels.recurrent import DeltaWeights, Mamba2Weights, RecurrentState, StateBatch
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import (
    AttentionBatch,
    AttentionParams,
    BatchLimits,
    ExpertPairs,
    LoraBatch,
    LoraTarget,
    Rotary,
    Targets,
    Weight,
)
from manylora.kernels.transfer import upload

EARLY_FROM = 9, 0  # first compute capability with programmatic dependent launch
SPARE_SLOTS = 64  # slots kept for adapters without running sequences
LARGEST_HEAD = 512  # elements; attention of wider heads uses PyTorch


class CudaOps(ReferenceOps):
    """No operation waits for the device. Under the interpreter, tensors may be on the host.

    part_keys: minimum keys of one program in decode attention. chooser: of block sizes; None: one that does
    not measure.
    """

    reads_tables = False

    def __init__(self, part_keys: int = PART_KEYS, chooser: BlockChooser | None = None) -> None:
        self._part_keys = part_keys
        self.chooser = chooser or BlockChooser()
        self._quantised = QuantisedLinears(chooser=self.chooser)
        self._orders: tuple[Order, ...] = (IN_TURN,)
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
        self._attention: AttentionBackend = choose(limits, device, chooser=self.chooser)
        if device.type == "cuda":
            self._second = SecondStream(device)
            early = torch.cuda.get_device_capability(device) >= EARLY_FROM
            self._orders = tuple(order for order in ORDERS if early or not order.early)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        with launch.compiling():
            yield

    @contextmanager
    def trials(self) -> Iterator[bool]:
        with self.chooser.measuring():
            yield self.chooser.can_measure

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
        plan = plan_lora(lora.segments, self._host_places, num_rows, fixed, routed)
        self._make_room(self._host_places.num_slots)
        for update in plan.updates:
            self._places[update.slot].copy_(upload(update.places, torch.int64, self._places.device))
        row_slots = {"row_slots": torch.from_numpy(plan.row_slots)} if routed else {}
        planned = PlannedLora(
            pool=lora.pool,
            segments=lora.segments,
            alignment=lora.alignment,
            extras=lora.extras,
            places=self._places,
            tiles=torch.from_numpy(plan.tiles),
            tile_size=plan.tile_size,
            rank=plan.rank,
            modules=plan.modules,
            encodings=plan.encodings,
            mixed=plan.mixed,
            weighed=plan.weighed,
            most_adapters=num_rows if fixed else len(lora.segments),
            **row_slots,
        )
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
            if not weight.is_plain:
                return weight.wide()
            self._quantised.narrows_experts(weight)  # run its trial now, not in a step
            return weight
        return self._quantised.pack(weight)

    def linear(self, x: Tensor, packed: Weight, bias: Tensor | None) -> Tensor:
        if isinstance(packed, QuantisedWeight | PackedInt4):
            return self._quantised(x, packed, bias)
        return super().linear(x, packed, bias)

    def lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, layer: int, targets: Targets, bias: Tensor | None = None
    ) -> None:
        assert isinstance(batch, PlannedLora), "a batch goes through `plan` first"
        tables = self._tables_of(x, batch, layer, targets, batch.tiles, batch.tile_size)
        if tables is not None:
            lora.expand_add(y, lora.shrink(x, tables), x.shape[1], tables, bias)

    def adapted_linear(
        self, x: Tensor, packed: Weight, bias: Tensor | None, batch: LoraBatch, layer: int, targets: Targets
    ) -> Tensor:
        assert isinstance(batch, PlannedLora), "a batch goes through `plan` first"
        if len(self._orders) == 1:
            return super().adapted_linear(x, packed, bias, batch, layer, targets)
        tables = self._tables_of(x, batch, layer, targets, batch.tiles, batch.tile_size)
        if tables is None:
            return self.linear(x, packed, bias)

        def run(order: Order) -> Tensor:
            if order.beside:
                with self._second.fork():
                    partial = lora.shrink(x, tables)
                y = self.linear(x, packed, bias)
                self._second.join()
            else:
                y = self.linear(x, packed, bias)
                partial = lora.shrink(x, tables, order.early)
            lora.expand_add(y, partial, x.shape[1], tables, bias, order.early)
            return y

        columns = sum(target.width for target in targets)
        shape = f"order {x.dtype} tile {batch.tile_size} in {x.shape[1]} out {columns}"
        return self._in_order(shape, run)

    def _in_order(self, shape: str, run: Callable[[Order], Tensor]) -> Tensor:
        """Use a chosen order only in a recording: elsewhere the additional host launches cost more than they
        save.
        """
        if is_recording():
            return run(self.chooser.choose_order(shape, self._orders, run))
        y = run(IN_TURN)  # chooses block sizes, which is not possible in a recording
        if self.chooser.is_measuring or launch.is_compiling():
            order = self.chooser.choose_order(shape, self._orders, run)
            if launch.is_compiling() and order != IN_TURN:
                run(order)
        return y

    def pair_up(
        self, choices: Tensor, num_experts: int, lora: LoraBatch | None
    ) -> tuple[ExpertPairs, Tensor]:
        assert lora is None or isinstance(lora, PlannedLora), "a batch goes through `plan` first"
        return routing.pair_up(choices, num_experts, lora)

    def expert_linear(self, x: Tensor, pairs: ExpertPairs, weights: Sequence[Weight]) -> Tensor:
        assert isinstance(pairs, routing.DevicePairs)
        return grouped_linear(x, pairs.tiles, pairs.tile_size, self._weight_table(weights), self.chooser)

    def expert_lora_add(
        self, y: Tensor, x: Tensor, batch: LoraBatch, pairs: ExpertPairs, layer: int, targets: Targets
    ) -> None:
        assert isinstance(batch, PlannedLora) and isinstance(pairs, routing.DevicePairs)
        tables = self._tables_of(x, batch, layer, targets, pairs.lora_tiles, pairs.lora_tile_size)
        if tables is not None:
            lora.expand_add(y, lora.shrink(x, tables), x.shape[1], tables, None)

    def rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary | None,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        return kv.rotate_and_store(q, k, v, rotary, k_cache, v_cache, batch.slots)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, params: AttentionParams
    ) -> Tensor:
        # Latent attention, or chunks of sequences, which the plan does not cover.
        if q.shape[-1] > LARGEST_HEAD or not isinstance(batch, PagedBatch):
            return super().attention(q, k_cache, v_cache, batch, params)
        return self._attention(q, k_cache, v_cache, batch, params)

    def delta_rule(
        self, x: Tensor, gates: Tensor, weights: DeltaWeights, state: RecurrentState, batch: StateBatch
    ) -> Tensor:
        return recurrent.delta_rule(x, gates, weights, state, batch)

    def mamba2(self, x: Tensor, weights: Mamba2Weights, state: RecurrentState, batch: StateBatch) -> Tensor:
        return recurrent.mamba2(x, weights, state, batch)

    def short_conv(self, x: Tensor, taps: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
        return recurrent.short_conv(x, taps, state, batch)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rows.add_rms_norm(x, delta, weight, eps)

    def gated(self, y: Tensor, activation: str) -> Tensor:
        return rows.gated(y, activation)

    def clamped_swiglu(self, y: Tensor, alpha: float, limit: float) -> Tensor:
        return rows.clamped_swiglu(y, alpha, limit)

    def _tables_of(
        self, x: Tensor, batch: PlannedLora, layer: int, targets: Targets, tiles: Tensor, tile_size: int
    ) -> lora.LoraTables | None:
        """None: no adapter in the batch has any of these modules."""
        present = tuple(target for target in targets if target.module_id in batch.modules)
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
            rank=batch.rank,
            align=next(size for size in ALIGNMENTS if common % size == 0),
            encodings=batch.encodings,
            mixed=batch.mixed,
            weighed=batch.weighed,
            chooser=self.chooser,
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
            narrow = isinstance(one, QuantisedWeight) and self._quantised.narrows_experts(one)
            known = self._tables[id(weights)] = weights, weight_table(weights, narrow)
        return known[1]
