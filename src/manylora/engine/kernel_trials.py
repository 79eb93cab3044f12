"""Runs a few batches with adapters at start. The device's operations thus measure and choose block sizes, and
compile the kernels that a step may launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from manylora.engine.inputs import StepInputs
from manylora.engine.peak import ALIGNMENT
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.kernels.spec import BatchLimits, LoraBatch, LoraRow, LoraSegment
from manylora.kernels.transfer import to_device
from manylora.lora.modules import LoraModule
from manylora.model.decoder import Decoder
from manylora.model.kv_tensors import KvTensors

logger = logging.getLogger("manylora")

# Rows of each sequence, each with its own adapter: decoding, a short prompt, a long prompt.
TRIALS = ((1,) * 8, (32,), (256,))
CONTEXT = 1024  # tokens of a decoding sequence
ADAPTED = RowFormat(16)
# Adapters that use other kernel variants, which are compiled but not measured.
OTHERS = (RowFormat(64), RowFormat(16, encoding=Encoding.FLOAT8), RowFormat(64, encoding=Encoding.FLOAT8))


def try_variants(
    decoder: Decoder,
    kv: KvTensors,
    ops: ReferenceOps,
    modules: Collection[LoraModule],
    limits: BatchLimits,
    device: torch.device,
) -> None:
    """Measure, and compile everything else that steps may launch. Results are dropped, and nothing is
    stored.
    """

    def run(adapted: RowFormat) -> None:
        for lengths in TRIALS:
            rows = [min(n, limits.max_seq_len) for n in lengths[: limits.max_sequences]]
            inputs = _inputs(rows, kv[0].shape[1], limits)
            lora = _adapters(inputs.starts, modules, adapted, limits, device)
            batch = replace(inputs, lora=lora).plan(ops)
            decoder.forward(to_device(batch, device), kv)

    started = time.perf_counter()
    try:
        with ops.trials() as wanted:
            if not wanted:
                return
            with ops.compiling():
                run(ADAPTED)
        with ops.trials():  # its time limit is for measurements only
            run(ADAPTED)
        with ops.compiling():
            for adapted in OTHERS if modules else ():
                run(adapted)
    except torch.OutOfMemoryError:
        logger.warning("no memory is left to measure block sizes: lower kv_cache_free_gpu_mem_fraction")
    logger.info("compiled kernels in %.1f s, with measuring", time.perf_counter() - started)


def _inputs(counts: list[int], num_blocks: int, limits: BatchLimits) -> StepInputs:
    """Sequences with these numbers of rows. Those with one row attend to the cache's blocks."""
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
    starts: list[int],
    modules: Collection[LoraModule],
    adapted: RowFormat,
    limits: BatchLimits,
    device: torch.device,
) -> LoraBatch | None:
    """An adapter of zeros for every sequence, with every module in every layer.

    Adapters and modules have separate memory, because one launch reads them all. Layers share it.
    """
    sizes = {module.module_id: module.row_elements(adapted) for module in modules if module.counted}
    if not sizes:
        return None
    steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()]
    offsets = dict(zip(sizes, accumulate([0, *steps]), strict=False))
    pool = torch.zeros((len(starts) - 1) * sum(steps), dtype=limits.dtype, device=device)
    segments = []
    for number, (start, stop) in enumerate(pairwise(starts)):
        places = {m: LoraRow(number * sum(steps) + offset, adapted) for m, offset in offsets.items()}
        layers = range(limits.num_layers)
        rows: dict[tuple[int, int], LoraRow] = {(at, m): row for at in layers for m, row in places.items()}
        segments.append(LoraSegment(start, stop, rows))
    return LoraBatch(pool, tuple(segments), ALIGNMENT)
