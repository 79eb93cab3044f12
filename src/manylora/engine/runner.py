"""Runner: turns a Step into one forward pass and its logits into tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from manylora.device import Device
from manylora.engine.beam import BeamGroup, Choice, choose
from manylora.engine.sampler import Row, adjust, sample
from manylora.engine.scheduler import Chunk, Step
from manylora.kernels.spec import AttentionBatch, LoraBatch
from manylora.lora.store import AdapterLease, AdapterStore
from manylora.model.batch import ForwardBatch
from manylora.model.decoder import Decoder

__all__ = ["Outcome", "Runner"]

logger = logging.getLogger("manylora")


@dataclass
class Outcome:
    """What one forward pass decided.

    tokens:  of each chunk that sampled: more than one where a guess was confirmed; NOT_FINITE: broken row.
    choices: of each beam search whose step this was; empty for a broken row.
    """

    tokens: dict[Chunk, list[tuple[int, float | None]]] = field(default_factory=dict)
    choices: dict[BeamGroup, list[Choice]] = field(default_factory=dict)


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
        self._vocab_size = decoder.config.vocab_size

    def run(self, step: Step) -> Outcome:
        chunks = sorted(step.chunks, key=lambda chunk: chunk.sequence.root)
        self._adapters.flush_loads()
        wanted = [_wanted(chunk) for chunk in chunks]
        logits = self._decoder.forward(self._batch(chunks, wanted), self._kv)
        outcome = Outcome()
        if not logits.shape[0]:
            return outcome
        drawn: list[tuple[Chunk, int, Row]] = []  # chunk, row of `logits`, whose
        beams: dict[BeamGroup, list[tuple[int, Row]]] = {}
        first = 0
        for chunk, positions in zip(chunks, wanted, strict=True):
            self._keep_context(chunk, positions, logits[first : first + len(positions)])
            for row, position in enumerate(positions, first):
                sequence = chunk.sequence
                if chunk.samples and position >= len(sequence.tokens) - 1 - sequence.num_draft:
                    if sequence.beams is not None:
                        beams.setdefault(sequence.beams, []).append((row, (sequence, position + 1)))
                    else:
                        drawn.append((chunk, row, (sequence, position + 1)))
            first += len(positions)
        self._choose(logits, beams, outcome)
        self._draw(logits, drawn, outcome)
        return outcome

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy keys and values of whole blocks, (from, to); a block is not both."""
        if pairs:
            source, target = (self._tensor(list(side)) for side in zip(*pairs, strict=True))
            self._kv[:, :, target] = self._kv[:, :, source]

    def _draw(self, logits: Tensor, drawn: list[tuple[Chunk, int, Row]], outcome: Outcome) -> None:
        if not drawn:
            return
        for chunk, row, _ in drawn:
            if chunk.sequence.request.params.return_generation_logits:
                chunk.sequence.generation_logits.append(_numpy(logits[row]))
        rows = [row for _, row, _ in drawn]
        picked = logits if len(rows) == logits.shape[0] else logits[rows]
        tokens, log_probs = sample(picked, [owner for _, _, owner in drawn])
        for (chunk, _, (sequence, length)), token, log_prob in zip(drawn, tokens, log_probs, strict=True):
            found = outcome.tokens.setdefault(chunk, [])
            # Of a guess: go on as long as each token before this one was guessed right.
            number = length - (len(sequence.tokens) - sequence.num_draft)
            if number == 0 or (len(found) == number and found[-1][0] == sequence.tokens[length - 1]):
                found.append((token, log_prob))

    def _choose(
        self, logits: Tensor, beams: dict[BeamGroup, list[tuple[int, Row]]], outcome: Outcome
    ) -> None:
        for group, members in beams.items():
            order = {id(sequence): i for i, sequence in enumerate(group.beams)}
            members.sort(key=lambda member: order[id(member[1][0])])
            picked = logits[[row for row, _ in members]]
            broken = adjust(picked, [owner for _, owner in members])
            temperature = group.leader.request.params.temperature or 1.0
            log_probs = torch.log_softmax(picked / temperature, dim=-1)
            outcome.choices[group] = [] if any(broken) else choose(log_probs, group)

    @staticmethod
    def _keep_context(chunk: Chunk, positions: range, logits: Tensor) -> None:
        sequence = chunk.sequence
        count = min(positions.stop, sequence.num_prompt) - positions.start
        if count <= 0 or not sequence.request.params.return_context_logits:
            return
        if sequence.context_logits is None:
            sequence.context_logits = np.empty((sequence.num_prompt, logits.shape[-1]), np.float32)
        sequence.context_logits[positions.start : positions.start + count] = _numpy(logits[:count])

    def _batch(self, chunks: list[Chunk], wanted: list[range]) -> ForwardBatch:
        starts = [0, *accumulate(chunk.count for chunk in chunks)]
        ids = [t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        rows = [
            start + position - chunk.start
            for chunk, start, range_ in zip(chunks, starts, wanted, strict=False)
            for position in range_
        ]
        return ForwardBatch(
            input_ids=self._tensor([i if i < self._vocab_size else 0 for i in ids]),
            positions=self._tensor(positions),
            attention=self._attention(chunks, starts),
            lora=self._lora(chunks, starts),
            logits_rows=self._tensor(rows),
            embeddings=self._embeddings(chunks, ids, starts),
        )

    def _embeddings(
        self, chunks: list[Chunk], ids: list[int], starts: list[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Rows that are not tokens of the vocabulary but of their request's own table, and the embeddings."""
        rows: list[int] = []
        vectors: list[np.ndarray] = []
        for chunk, start, stop in zip(chunks, starts, starts[1:], strict=False):
            table = chunk.sequence.request.prompt_table
            if table is not None:
                for row in range(start, stop):
                    if ids[row] >= self._vocab_size:
                        rows.append(row)
                        vectors.append(table[ids[row] - self._vocab_size])
        if not rows:
            return None
        values = torch.from_numpy(np.stack(vectors).astype(np.float32)).to(self._decoder.dtype)
        return self._tensor(rows), values.to(self._device.torch)

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


def _wanted(chunk: Chunk) -> range:
    """The positions of a chunk whose logits are needed."""
    sequence, stop = chunk.sequence, chunk.start + chunk.count
    if sequence.request.params.return_context_logits and chunk.start < sequence.num_prompt:
        return range(chunk.start, stop)
    return range(stop - 1 - sequence.num_draft, stop) if chunk.samples else range(stop, stop)


def _numpy(logits: Tensor) -> np.ndarray:
    return logits.to("cpu", torch.float32, copy=True).numpy()
