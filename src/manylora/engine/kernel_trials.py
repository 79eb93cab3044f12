"""A few batches with adapters at start, so that the device's operations measure and choose block sizes."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from manylora.engine.inputs import StepInputs
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import BatchLimits, LoraBatch, LoraRow, LoraSegment
from manylora.kernels.transfer import to_device
from manylora.lora.modules import LoraModule
from manylora.model.decoder import Decoder

logger = logging.getLogger("manylora")

# Rows of each sequence, each with an adapter of its own: decoding, a short prompt, a long one.
TRIALS = ((1,) * 8, (32,), (256,))
CONTEXT = 1024  # tokens of a sequence that decodes
RANK = 16
ALIGNMENT = 16  # elements; as real pools have it


def try_variants(
    decoder: Decoder,
    kv: Tensor,
    ops: ReferenceOps,
    modules: Collection[LoraModule],
    limits: BatchLimits,
    device: torch.device,
) -> None:
    """Results are dropped, and no key or value is stored."""
    with ops.trials() as wanted:
        if not wanted:
            return
        try:
            for lengths in TRIALS:
                rows = [min(n, limits.max_seq_len) for n in lengths[: limits.max_sequences]]
                inputs = _inputs(rows, kv.shape[2], limits)
                batch = replace(inputs, lora=_adapters(inputs.starts, modules, limits, device)).plan(ops)
                decoder.forward(to_device(batch, device), kv)
        except torch.OutOfMemoryError:
            logger.warning("no memory is left to measure block sizes: lower kv_cache_free_gpu_mem_fraction")


def _inputs(counts: list[int], num_blocks: int, limits: BatchLimits) -> StepInputs:
    """Sequences of so many rows; those of one row attend to what is in the cache's blocks."""
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lengths = [min(CONTEXT, limits.max_seq_len) if n == 1 else n for n in counts]
    columns = [-(-n // limits.tokens_per_block) for n in lengths]
    return StepInputs(
        input_ids=[0] * starts[-1],
        positions=[length - n + i for n, length in zip(counts, lengths, strict=True) for i in range(n)],
        starts=starts,
        lengths=lengths,
        blocks=[[(sum(columns[:s]) + i) % num_blocks for i in range(n)] for s, n in enumerate(columns)],
        slots=[-1] * starts[-1],
        logits_rows=[stop - 1 for stop in starts[1:]],
    )


def _adapters(
    starts: list[int], modules: Collection[LoraModule], limits: BatchLimits, device: torch.device
) -> LoraBatch | None:
    """An adapter of zeros for every sequence, with every module in every layer, all at one address."""
    adapted = RowFormat(RANK)
    sizes = {module.module_id: module.row_elements(adapted) for module in modules if module.counted}
    if not sizes:
        return None
    pool = torch.zeros(max(sizes.values()), dtype=limits.dtype, device=device)
    row = LoraRow(0, adapted)
    segments = [
        LoraSegment(start, stop, {(layer, m): row for layer in range(limits.num_layers) for m in sizes})
        for start, stop in pairwise(starts)
    ]
    return LoraBatch(pool, tuple(segments), ALIGNMENT)
