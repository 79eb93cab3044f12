"""Driver: runs a model on several sequences without an engine, and returns all logits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manylora.adapters.modules import LoraModule, lora_modules
from manylora.checkpoints.quant.config import QuantConfig
from manylora.config.blocks import RecurrentConfig
from manylora.kernels.device import open_device
from manylora.kernels.recurrent import RecurrentState, StateBatch
from manylora.kernels.row_format import RowFormat
from manylora.kernels.spec import AttentionBatch, Extra, ExtraSegment, LoraBatch, LoraRow, LoraSegment
from manylora.model.batch import ForwardBatch, make_kv, make_states
from manylora.model.checkpoint import read_model_config
from manylora.model.decoder import Decoder
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.weights import load_decoder
from manylora.request import LoraExtra, LoraInput

BLOCK, BLOCKS = 8, 128
Tensors = tuple[np.ndarray, np.ndarray]
"""Weights and config of an adapter, as in a request."""
Adapter = Tensors | LoraInput | None
"""LoraInput if there are extras; None: the base model."""


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether logits agree within 1e-4 of the largest one, with the same greedy token at each position."""
    near = (found - expected).abs().max() / expected.abs().max() < 1e-4
    return bool(near) and torch.equal(found.argmax(-1), expected.argmax(-1))


def decoder_of(
    model: Path,
    max_seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    quant: QuantConfig | None = None,
) -> Any:
    """The decoder of a model's folder, or its encoder and decoder, on the CPU."""
    return load_decoder(model, read_model_config(model), dtype, open_device("cpu"), max_seq_len, quant)


class Driver:
    """Runs several sequences in packed steps, with scattered KV blocks, and collects all logits.

    adapters: one per sequence. modules: the modules of the adapters' rows, None for the model's. texts: the
    encoder's prompts, for an encoder-decoder model. kv_dtype: None for the decoder's.
    """

    def __init__(
        self,
        decoder: Decoder | EncoderDecoder,
        sequences: Sequence[Sequence[int]],
        adapters: Sequence[Adapter],
        texts: Sequence[Sequence[int]] = (),
        modules: Mapping[int, LoraModule] | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        config = decoder.config
        unset = partial(torch.full, fill_value=float("nan"), dtype=kv_dtype or decoder.dtype)
        self._kv = make_kv(config, BLOCKS, BLOCK, unset)
        self._decoder, self._sequences = decoder, sequences
        blocks = list(range(BLOCKS))
        random.Random(5).shuffle(blocks)
        self._blocks = [[blocks.pop() for _ in range(-(-len(s) // BLOCK))] for s in sequences]
        pool, self._rows = _make_pool(adapters, modules or lora_modules(config))
        self._pool = pool.to(decoder.dtype)
        self._extras = [
            {e.name: _scattered(e, decoder.dtype) for e in one.extras} if isinstance(one, LoraInput) else {}
            for one in adapters
        ]
        self._texts = [list(text) for text in texts]
        self._text_blocks = [[blocks.pop() for _ in range(-(-len(t) // BLOCK))] for t in texts]
        if isinstance(decoder, EncoderDecoder):
            self._encode(decoder)
        self._states = None if config.recurrent is None else _unused_states(config.recurrent, len(sequences))
        self._turns = [0] * len(sequences)
        self._done = [0] * len(sequences)
        self._logits: list[list[Tensor]] = [[] for _ in sequences]

    def run(self) -> list[Tensor]:
        """Logits [len, vocab] of each sequence. Prompts are processed in unequal chunks, the rest token by
        token, with all sequences packed together.
        """
        plans = [[max(len(s) // part, 1) for part in (2, 4, 8)] for s in self._sequences]
        while any(d < len(s) for d, s in zip(self._done, self._sequences, strict=True)):
            counts = []
            for s, plan in enumerate(plans):
                left = len(self._sequences[s]) - self._done[s]
                counts.append(min(plan.pop(0) if plan else 1, left))
            self._step(counts)
        return [torch.cat(parts) for parts in self._logits]

    def _encode(self, model: EncoderDecoder) -> None:
        members, counts = list(range(len(self._texts))), [len(text) for text in self._texts]
        zeros = [0] * len(members)
        attention, positions = _attention(self._text_blocks, zeros, counts)
        batch = ForwardBatch(
            torch.tensor([token for text in self._texts for token in text]),
            positions,
            attention,
            self._lora(members, attention.query_starts),
            torch.tensor([], dtype=torch.long),
        )
        model.encode(batch, self._kv)

    def prefill(self, rows: Sequence[int] | None = None) -> Tensor:
        """Process all sequences completely in one step. Returns logits [L, vocab] of `rows`, None for all."""
        return self._forward([len(s) for s in self._sequences], rows)

    def _step(self, counts: list[int]) -> None:
        members = [s for s, count in enumerate(counts) if count]
        counts = [counts[s] for s in members]
        parts = self._forward(counts, None, members).split(counts)
        for s, count, logits in zip(members, counts, parts, strict=True):
            self._logits[s].append(logits)
            self._done[s] += count

    def _forward(
        self, counts: list[int], rows: Sequence[int] | None = None, members: list[int] | None = None
    ) -> Tensor:
        """Process this many tokens of each member."""
        members = list(range(len(counts))) if members is None else members
        done = [self._done[s] for s in members]
        attention, positions = _attention([self._blocks[s] for s in members], done, counts)
        spans = zip(members, done, counts, strict=True)
        ids = torch.tensor([token for s, d, n in spans for token in self._sequences[s][d : d + n]])
        batch = ForwardBatch(
            ids,
            positions,
            attention,
            self._lora(members, attention.query_starts),
            torch.arange(len(ids)) if rows is None else torch.tensor(rows, dtype=torch.long),
            cross=self._cross(members, attention.query_starts),
            rope_lengths=torch.tensor(
                [len(self._sequences[s]) for s, n in zip(members, counts, strict=True) for _ in range(n)]
            ),
            state=self._state_batch(members, attention.query_starts),
        )
        if isinstance(self._decoder, Decoder):
            return self._decoder.forward(batch, self._kv, self._states)
        return self._decoder.forward(batch, self._kv)

    def _state_batch(self, members: list[int], starts: Sequence[int]) -> StateBatch | None:
        """A sequence's slot changes in each step, so that no slot is both read and written."""
        if self._states is None:
            return None
        count = len(self._sequences)
        reads = [s + count * (self._turns[s] % 2) if self._turns[s] else -1 for s in members]
        for s in members:
            self._turns[s] += 1
        writes = [s + count * (self._turns[s] % 2) for s in members]
        unused = torch.zeros(len(members), dtype=torch.long)
        first, read, written = (torch.tensor(list(one)) for one in (starts, reads, writes))
        return StateBatch(first, read, written, unused, unused)

    def _lora(self, members: list[int], starts: Sequence[int]) -> LoraBatch | None:
        spans = [
            (*span, self._rows[s], self._extras[s]) for s, span in zip(members, pairwise(starts), strict=True)
        ]
        segments = tuple(
            LoraSegment(start, stop, rows) for start, stop, rows, extras in spans if rows or extras
        )
        extras = tuple(
            ExtraSegment(start, stop, extras, slice(start, stop))
            for start, stop, _, extras in spans
            if extras
        )
        return LoraBatch(self._pool, segments, extras=extras) if segments else None

    def _cross(self, members: list[int], starts: Sequence[int]) -> AttentionBatch | None:
        if not self._texts:
            return None
        table, lens = _table([self._text_blocks[s] for s in members]), [len(self._texts[s]) for s in members]
        return AttentionBatch(starts, lens, table, torch.tensor([], dtype=torch.long))


def _attention(
    blocks: Sequence[Sequence[int]], done: Sequence[int], counts: Sequence[int]
) -> tuple[AttentionBatch, Tensor]:
    """For `counts` new rows of each sequence after `done` rows; and the positions [T] of the rows."""
    ends = [d + n for d, n in zip(done, counts, strict=True)]
    spans = [range(d, end) for d, end in zip(done, ends, strict=True)]
    slots = [b[p // BLOCK] * BLOCK + p % BLOCK for b, span in zip(blocks, spans, strict=True) for p in span]
    attention = AttentionBatch([0, *accumulate(counts)], ends, _table(blocks), torch.tensor(slots))
    return attention, torch.tensor([p for span in spans for p in span])


def _unused_states(config: RecurrentConfig, count: int) -> RecurrentState:
    """Two slots per sequence, filled with NaN."""
    states = make_states(config, 2 * count, torch.device("cpu"))
    states.inputs.fill_(float("nan")), states.memory.fill_(float("nan"))
    return states


def _table(blocks: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, blocks))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in blocks], dtype=torch.int32)


def _scattered(extra: LoraExtra, dtype: torch.dtype) -> Extra:
    """The extra in three pieces of a separate pool, in reverse order and with NaN between them."""
    values = torch.from_numpy(extra.values).to(dtype)
    values = values if values.ndim == 2 else values.unsqueeze(1)
    parts = values.split(-(-len(values) // 3))[::-1]
    gap = torch.full((7,), float("nan"), dtype=dtype)
    pool = torch.cat([piece for part in parts for piece in (gap, part.reshape(-1))])
    starts, views, used = [], [], 0
    for part in parts:
        starts.append(used + 7)
        used += 7 + part.numel()
        views.append(pool[starts[-1] : used].view(part.shape))
    ids = torch.tensor(extra.token_ids) if extra.token_ids else None
    return Extra(pool, tuple(views[::-1]), torch.tensor(starts[::-1]), ids)


def _make_pool(
    adapters: Sequence[Adapter], modules: Mapping[int, LoraModule]
) -> tuple[Tensor, list[dict[tuple[int, int], LoraRow]]]:
    """All adapters in one flat pool, and the locations of their rows: at odd offsets, with NaN between
    them.
    """
    pieces, adapters_rows, used = [np.full(13, np.nan, np.float32)], [], 13
    for adapter in adapters:
        rows: dict[tuple[int, int], LoraRow] = {}
        for payload, row in zip(*_tensors(adapter), strict=True) if adapter else ():
            module_id, layer, rank, dora = (*row.tolist(), 0)[:4]  # the fourth column may be absent
            module = modules[module_id].at(layer)
            kind = RowFormat(rank, bool(dora))
            a, b, rest, _ = np.split(payload, np.cumsum(module.row_sizes(kind)))
            rows[layer, module_id] = LoraRow(used, kind)
            turned = b.reshape(module.experts, -1, rank).swapaxes(1, 2).reshape(module.experts, -1)
            pairs = np.concatenate((a.reshape(module.experts, -1), turned), axis=1)
            pieces += [pairs.ravel(), rest, np.full(5, np.nan, np.float32)]
            used += module.row_elements(kind) + 5
        adapters_rows.append(rows)
    return torch.from_numpy(np.concatenate(pieces)), adapters_rows


def _tensors(adapter: Tensors | LoraInput) -> tuple[np.ndarray, np.ndarray]:
    """Weights [rows, W] and config [rows, 3 or 4]."""
    weights, config = (adapter.weights, adapter.config) if isinstance(adapter, LoraInput) else adapter
    assert weights is not None and config is not None
    return weights[0], config[0]
