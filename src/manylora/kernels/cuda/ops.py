"""CudaOps: the operations of a CUDA device. PyTorch's GEMM; kernels in the Triton language for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from manylora.kernels.cuda import kv, lora, rows
from manylora.kernels.cuda.backends import AttentionBackend, choose
from manylora.kernels.cuda.plan import MODULES, PLACE, Places, plan_lora
from manylora.kernels.cuda.tables import MIN_SPLIT_KEYS, PagedBatch, PlannedLora, plan_attention
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionBatch, BatchLimits, LoraBatch, LoraTarget

__all__ = ["CudaOps"]

SPARE_SLOTS = 64  # places of adapters that no running sequence has, kept for when they come back
ALIGNMENTS = (16, 8, 4, 2, 1)


class CudaOps(ReferenceOps):
    """Nothing here waits for the device, but for what is left to the reference: soft caps.

    Tensors may lie elsewhere when the kernels are interpreted.

    split_keys: keys of one program in decode attention, at least.
    """

    def __init__(self, split_keys: int = MIN_SPLIT_KEYS) -> None:
        self._split_keys = split_keys
        self._targets: dict[tuple[LoraTarget, ...], Tensor] = {}

    def reserve(self, limits: BatchLimits, device: torch.device) -> None:
        slots = limits.max_sequences + SPARE_SLOTS
        self._limits = limits
        self._host_places = Places(slots, limits.num_layers)
        shape = (slots, limits.num_layers, MODULES, PLACE)
        self._places = torch.zeros(shape, dtype=torch.int64, device=device)
        self._attention: AttentionBackend = choose(limits, device)

    def plan(
        self, attention: AttentionBatch, lora: LoraBatch | None, fixed: bool = False
    ) -> tuple[PagedBatch, PlannedLora | None]:
        paged = plan_attention(attention, self._limits, fixed, self._split_keys)
        if lora is None:
            return paged, None
        plan = plan_lora(lora.segments, self._host_places, len(attention.slots) if fixed else None)
        for update in plan.updates:
            self._places[update.slot].copy_(torch.from_numpy(update.places), non_blocking=True)
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
        )
        return paged, planned

    def lora_add(
        self,
        y: Tensor,
        x: Tensor,
        batch: LoraBatch,
        layer: int,
        targets: Sequence[LoraTarget],
        bias: Tensor | None = None,
    ) -> None:
        assert isinstance(batch, PlannedLora), "a batch goes through `plan` first"
        present = tuple(target for target in targets if target.module_id in batch.modules)
        if not present:
            return
        in_dim = x.shape[1]
        common = math.gcd(batch.alignment, in_dim, *(t.start for t in present), *(t.width for t in present))
        tables = lora.LoraTables(
            pool=batch.pool,
            places=batch.places,
            tiles=batch.tiles,
            targets=self._target_table(present, x.device),
            layer=layer,
            tile_size=batch.tile_size,
            rank=batch.rank,
            align=next(size for size in ALIGNMENTS if common % size == 0),
        )
        lora.expand_add(y, lora.shrink(x, tables), in_dim, tables, bias)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
        kv.store_kv(k, v, k_cache, v_cache, batch.slots)

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        assert isinstance(batch, PagedBatch), "a batch goes through `plan` first"
        if softcap is not None:
            return super().attention(q, k_cache, v_cache, batch, scale, window, softcap)
        return self._attention(q, k_cache, v_cache, batch, scale, window)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        return rows.rms_norm(x, weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rows.rotary(x, cos, sin)

    def _target_table(self, targets: tuple[LoraTarget, ...], device: torch.device) -> Tensor:
        """[targets, 3] int32 on the device; one for each kind of linear layer, made once."""
        if targets not in self._targets:
            values = [(t.module_id, t.start, t.width) for t in targets]
            self._targets[targets] = torch.tensor(values, dtype=torch.int32, device=device)
        return self._targets[targets]
