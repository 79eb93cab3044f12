"""Steps that run at start and serve nobody: one measures the memory that the largest step takes, others
compile the kernels that a step may launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, product

import torch

from manylora.adapters.modules import LoraModule
from manylora.config.engine import EngineConfig
from manylora.engine.inputs import StepInputs
from manylora.engine.sampler import sample
from manylora.engine.sequence import Sequence as Running
from manylora.errors import ConfigError
from manylora.kernels.device import Device
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.row_format import Encoding, RowFormat
from manylora.kernels.spec import BatchLimits, LoraBatch, LoraRow, LoraSegment
from manylora.kernels.transfer import to_device
from manylora.model.batch import KvTensors, make_kv
from manylora.model.decoder import Decoder
from manylora.request import MAX_MIXED, Request, SamplingConfig

logger = logging.getLogger("manylora")

ALIGNMENT = 16  # elements; as in real pools


def peak_bytes(
    decoder: Decoder, device: Device, limits: BatchLimits, config: EngineConfig, modules: Iterable[LoraModule]
) -> int:
    """Peak bytes of the largest prefill and of sampling for a full batch. 0 on a CPU. Raises ConfigError.
    There is the largest mix of adapters: the memory per row grows with the sum of their ranks.
    """

    def run() -> None:
        left, lengths = config.max_num_tokens, list[int]()
        while left > 0 and len(lengths) < limits.max_sequences:
            lengths.append(min(limits.max_seq_len, left))
            left -= lengths[-1]
        inputs, adapted = _inputs(lengths, 1, limits, context=1, slot=0), RowFormat(config.lora.rank_limit)
        inputs.lora = _adapters(inputs.starts, list(modules), adapted, limits, device.torch, MAX_MIXED)
        made = partial(torch.zeros, dtype=limits.kv_dtype or limits.dtype, device=device.torch)
        kv = make_kv(decoder.config, 1, limits.tokens_per_block, made)
        device.ops.reserve(limits, device.torch)
        decoder.forward(to_device(inputs.plan(device.ops), device.torch), kv)
        del inputs, kv
        params = SamplingConfig(temperature=0.8, top_p=0.9, min_p=0.01, return_log_probs=True)
        sequence = Running(0, Request((0,), params), 0, 2)
        shape = config.max_decode_rows, decoder.config.vocab_size
        sample(torch.zeros(shape, device=device.torch), [(sequence, 1)] * config.max_decode_rows)

    try:
        peak = device.peak_bytes(run)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {config.max_num_tokens} tokens and {config.max_batch_size} sequences does not fit "
            "beside the weights: lower max_num_tokens or max_batch_size"
        ) from error
    if peak:
        logger.info("the largest step takes %d MiB beside weights and caches", peak // 2**20)
    return peak


# Rows of each sequence, each with its own adapter: decoding, a short prompt, a long prompt.
TRIALS = ((1,) * 8, (32,), (256,))
CONTEXT = 1024  # tokens of a decoding sequence
# Adapters that use different kernel variants.
FORMATS = tuple(RowFormat(rank, encoding=one) for one in Encoding for rank in (16, 64))


def compile_kernels(
    decoder: Decoder,
    kv: KvTensors,
    ops: ReferenceOps,
    modules: Collection[LoraModule],
    limits: BatchLimits,
    device: torch.device,
) -> None:
    """Compile the kernels that steps may launch. Results are dropped, and nothing is stored."""
    started = time.perf_counter()
    try:
        with ops.compiling() as compiles:
            if not compiles:
                return
            for adapted, lengths in product(FORMATS if modules else FORMATS[:1], TRIALS):
                rows = [min(n, limits.max_seq_len) for n in lengths[: limits.max_sequences]]
                inputs = _inputs(rows, kv[0].shape[1], limits)
                inputs.lora = _adapters(inputs.starts, modules, adapted, limits, device)
                decoder.forward(to_device(inputs.plan(ops), device), kv)
    except torch.OutOfMemoryError:
        logger.warning("no memory is left to compile all kernels: lower kv_cache_free_gpu_mem_fraction")
    logger.info("compiled kernels in %.1f s", time.perf_counter() - started)


def _inputs(
    counts: list[int], num_blocks: int, limits: BatchLimits, context: int = CONTEXT, slot: int = -1
) -> StepInputs:
    """Sequences with these numbers of rows. slot: where all keys and values go; -1: nowhere."""
    starts = [0, *accumulate(counts)]
    lengths = [min(context, limits.max_seq_len) if n == 1 else n for n in counts]
    columns = [-(-n // limits.tokens_per_block) for n in lengths]
    return StepInputs(
        input_ids=[0] * starts[-1],
        positions=[length - n + i for n, length in zip(counts, lengths, strict=True) for i in range(n)],
        starts=starts,
        lengths=lengths,
        blocks=[[(sum(columns[:s]) + i) % num_blocks for i in range(n)] for s, n in enumerate(columns)],
        slots=[slot] * starts[-1],
        logits_rows=[stop - 1 for stop in starts[1:]],
    )


def _adapters(
    starts: list[int],
    modules: Collection[LoraModule],
    adapted: RowFormat,
    limits: BatchLimits,
    device: torch.device,
    members: int = 1,
) -> LoraBatch | None:
    """For every sequence an adapter of zeros, with every module in every layer, in memory of its own.
    members: more than 1: one mix of so many for all, whose rows share one place in memory.
    """
    sizes = {module.module_id: module.row_elements(adapted) for module in modules if module.counted}
    if not sizes:
        return None
    steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()]
    offsets = dict(zip(sizes, accumulate([0, *steps]), strict=False))
    stride, elements = sum(steps), (len(starts) - 1) * sum(steps)
    if members > 1:
        offsets, stride, elements = dict.fromkeys(sizes, 0), 0, max(sizes.values())
    tables: dict[int, dict[tuple[int, int], LoraRow]] = {}  # by the first element
    segments = []
    for number, (start, stop) in enumerate(pairwise(starts)):
        first = number * stride
        if first not in tables:
            places = {m: LoraRow(first + offset, adapted) for m, offset in offsets.items()}
            rows = {m: replace(row, more=(row,) * (members - 1)) for m, row in places.items()}
            tables[first] = {(at, m): row for at in range(limits.num_layers) for m, row in rows.items()}
        segments.append(LoraSegment(start, stop, tables[first]))
    return LoraBatch(torch.zeros(elements, dtype=limits.dtype, device=device), tuple(segments), ALIGNMENT)
