"""Runner: turns a Step into one forward pass and its logits into tokens."""

from __future__ import annotations

import logging
from itertools import accumulate

import torch
from torch import Tensor

from manylora.device import Device
from manylora.engine.sampler import sample
from manylora.engine.scheduler import Chunk, Step
from manylora.kernels.spec import AttentionBatch, LoraBatch
from manylora.lora.store import AdapterLease, AdapterStore
from manylora.model.batch import ForwardBatch
from manylora.model.decoder import Decoder

__all__ = ["Runner", "Sampled"]

logger = logging.getLogger("manylora")

Sampled = dict[Chunk, tuple[int, float | None]]
"""The chunks that sampled, each with its token (or `sampler.NOT_FINITE`) and log probability."""


class Runner:
    """Owns the decoder and the KV tensor. Sequences of a batch are ordered by adapter, so that each adapter
    is one run of rows, the base model's rows first."""

    def __init__(
        self, decoder: Decoder, kv: Tensor, device: Device, adapters: AdapterStore, tokens_per_block: int
    ) -> None:
        self.max_adapters_in_step = 0
        self._decoder = decoder
        self._kv = kv
        self._device = device
        self._adapters = adapters
        self._tokens_per_block = tokens_per_block

    def run(self, step: Step) -> Sampled:
        chunks = sorted(step.chunks, key=lambda chunk: chunk.sequence.root)
        sampling = [chunk for chunk in chunks if chunk.samples]
        self._adapters.flush_loads()
        logits = self._decoder.forward(self._batch(chunks), self._kv)
        if not sampling:
            return {}
        tokens, log_probs = sample(logits, [chunk.sequence for chunk in sampling])
        return dict(zip(sampling, zip(tokens, log_probs, strict=True), strict=True))

    def _batch(self, chunks: list[Chunk]) -> ForwardBatch:
        starts = [0, *accumulate(chunk.count for chunk in chunks)]
        ids = [t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        last_rows = [stop - 1 for c, stop in zip(chunks, starts[1:], strict=True) if c.samples]
        return ForwardBatch(
            input_ids=self._tensor(ids),
            positions=self._tensor(positions),
            attention=self._attention(chunks, starts),
            lora=self._lora(chunks, starts),
            logits_rows=self._tensor(last_rows),
        )

    def _attention(self, chunks: list[Chunk], starts: list[int]) -> AttentionBatch:
        size = self._tokens_per_block
        lengths = [chunk.start + chunk.count for chunk in chunks]
        used = [-(-length // size) for length in lengths]
        width = max(used)
        table = [c.sequence.blocks[:n] + [0] * (width - n) for c, n in zip(chunks, used, strict=True)]
        slots = [
            c.sequence.blocks[position // size] * size + position % size
            for c in chunks
            for position in range(c.start, c.start + c.count)
        ]
        return AttentionBatch(
            query_starts=starts,
            kv_lens=lengths,
            block_table=self._tensor(table, torch.int32),
            slots=self._tensor(slots),
        )

    def _lora(self, chunks: list[Chunk], starts: list[int]) -> LoraBatch | None:
        segments: dict[str, tuple[int, int, AdapterLease]] = {}
        for chunk, start, stop in zip(chunks, starts, starts[1:], strict=False):
            lease = chunk.sequence.lease
            if isinstance(lease, AdapterLease):
                first = segments[lease.digest][0] if lease.digest in segments else start
                segments[lease.digest] = (first, stop, lease)
        if not segments:
            return None
        if len(segments) > self.max_adapters_in_step:
            self.max_adapters_in_step = len(segments)
            logger.info("manylora: %d distinct adapters in one step", len(segments))
        return self._adapters.batch(list(segments.values()))

    def _tensor(self, values: list, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device.torch, non_blocking=True)
