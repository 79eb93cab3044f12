"""Trial: a few batches under adapters at start, so that the device's operations choose their block sizes."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from manylora.engine.inputs import StepInputs
from manylora.kernels.moving import to_device
from manylora.kernels.spec import BatchLimits, LoraBatch, LoraRow, LoraSegment, Ops
from manylora.lora.modules import LoraModule
from manylora.model.decoder import Decoder

__all__ = ["try_variants"]

logger = logging.getLogger("manylora")

# Rows of each sequence, all under adapters of their own: decoding, a short prompt, a long one.
TRIALS = ((1,) * 8, (32,), (256,))
RANK = 16
ALIGNMENT = 16  # elements; as real pools have it


def try_variants(
    decoder: Decoder,
    kv: Tensor,
    ops: Ops,
    modules: Collection[LoraModule],
    limits: BatchLimits,
    device: torch.device,
) -> None:
    """Nothing is kept of what the batches compute, and no key or value is stored."""
    with ops.trials() as wanted:
        if not wanted:
            return
        try:
            for lengths in TRIALS:
                rows = [min(n, limits.max_seq_len) for n in lengths[: limits.max_sequences]]
                inputs = _inputs(rows, limits)
                batch = replace(inputs, lora=_adapters(inputs.starts, modules, limits, device)).plan(ops)
                decoder.forward(to_device(batch, device), kv)
        except torch.OutOfMemoryError:
            logger.warning("no memory is left to measure block sizes: lower kv_cache_free_gpu_mem_fraction")


def _inputs(lengths: list[int], limits: BatchLimits) -> StepInputs:
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return StepInputs(
        input_ids=[0] * starts[-1],
        positions=[position for n in lengths for position in range(n)],
        starts=starts,
        lengths=lengths,
        blocks=[[0] * -(-n // limits.tokens_per_block) for n in lengths],
        slots=[-1] * starts[-1],
        logits_rows=[stop - 1 for stop in starts[1:]],
    )


def _adapters(
    starts: list[int], modules: Collection[LoraModule], limits: BatchLimits, device: torch.device
) -> LoraBatch | None:
    """Every sequence's has every module in every layer, all in one place, of zeros."""
    sizes = {module.module_id: module.row_elements(RANK) for module in modules if module.counted}
    if not sizes:
        return None
    pool = torch.zeros(max(sizes.values()), dtype=limits.dtype, device=device)
    row = LoraRow(0, RANK)
    segments = [
        LoraSegment(start, stop, {(layer, m): row for layer in range(limits.num_layers) for m in sizes})
        for start, stop in pairwise(starts)
    ]
    return LoraBatch(pool, tuple(segments), ALIGNMENT)
