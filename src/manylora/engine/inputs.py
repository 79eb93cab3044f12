"""The inputs of one forward pass: StepInputs, lists on the host, KeptInputs, which are reused from step to
step, and InputMaker, which makes them from the chunks of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from manylora.adapters.cache.leases import Lease
from manylora.adapters.cache.pool import with_virtual
from manylora.adapters.cache.store import AdapterStore
from manylora.engine.scheduler import Chunk, DecodeRun
from manylora.engine.sequence import PENDING, Sequence
from manylora.engine.step import LaunchedStep
from manylora.kernels.recurrent import StateBatch
from manylora.kernels.reference import ReferenceOps
from manylora.kernels.spec import AttentionBatch, BatchLimits, LoraBatch, with_logits
from manylora.kernels.transfer import upload
from manylora.model.batch import ForwardBatch, HiddenRows
from manylora.model.decoder import Decoder
from manylora.model.encoder_decoder import EncoderDecoder

logger = logging.getLogger("manylora")

Ints = Rows[int] | np.ndarray
Blocks = Rows[Ints] | np.ndarray
"""The KV blocks of each sequence, or [S, columns] in which anything may follow a sequence's blocks."""


@dataclass(frozen=True)
class Pending:
    """Tokens [D] that only the device knows. where: [2, P] int64, rows of a step and their indices; None: all
    rows.
    """

    where: Tensor | None
    tokens: Tensor


@dataclass(frozen=True)
class StateRows:
    """Slots of recurrent state of S sequences, as in `StateBatch`."""

    reads: list[int]
    writes: list[int]
    cuts: list[int]
    saves: list[int]

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> StateRows:
        found = [(s.state.reads, s.state.slot, s.state.cut, s.state.save_slot) for s in sequences]
        return cls(*map(list, zip(*found, strict=True)))

    def next_step(self) -> StateRows:
        """The slots for the next step, which decodes one token of each sequence."""
        none = [0] * len(self.writes)
        return StateRows(self.writes, self.writes, none, none)

    def pad(self, count: int) -> StateRows:
        """With `count` more sequences, which start from zeros and store nothing."""
        none, zeros = [-1] * count, [0] * count
        return StateRows(self.reads + none, self.writes + none, self.cuts + zeros, self.saves + none)

    def plan(self, starts: list[int]) -> StateBatch:
        return StateBatch(*map(_copied, (starts, self.reads, self.writes, self.cuts, self.saves)))


@dataclass  # not frozen, because that is slower to create
class StepInputs:
    """T rows of S sequences. Created by the runner. Shapes without a comment are [T]."""

    input_ids: Ints
    positions: Ints
    starts: list[int]  # [S + 1], as in `AttentionBatch`
    lengths: Ints  # [S]
    blocks: Blocks  # [S], the KV blocks of each sequence
    slots: Ints
    logits_rows: Ints  # rows whose logits are needed
    lora: LoraBatch | None = None
    embeddings: tuple[Tensor, Tensor] | None = None
    cross_lengths: list[int] = field(default_factory=list)  # [S], of the encoder's output, if there is one
    cross_blocks: Blocks = field(default_factory=list)
    pending: Pending | None = None  # tokens that `fill` writes over zeros in input_ids
    rope_lengths: Ints | None = None  # see `ForwardBatch`; None: positions + 1
    adapters: Rows[tuple[int, int, Rows[tuple[str, float]]]] = ()  # rows, digests and scales of segments
    state: StateRows | None = None  # for a model with recurrent layers
    virtual: Rows[tuple[int, int]] = ()  # rows that are virtual tokens, with their token numbers
    token_types: Ints | None = None  # for models that distinguish two texts in a prompt
    pooled_rows: Ints = ()  # rows whose hidden states are needed
    hidden: Tensor | None = None  # these, on the device, written by the runner
    best: Tensor | None = None  # as in `Best`, written by the runner

    @property
    def decodes(self) -> bool:
        """Whether a graph can run this: one row of each sequence, with logits, and no extras of adapters."""
        rows = len(self.input_ids)
        plain = self.embeddings is None and self.rope_lengths is None
        plain = plain and not (self.lora and self.lora.extras)
        return plain and rows == len(self.lengths) == len(self.logits_rows)

    def pad(self, rows: int) -> StepInputs:
        """The same, padded to `rows` rows with sequences of one token that store nothing."""
        known = len(self.input_ids)
        count = rows - known
        if not count:
            return self
        if isinstance(self.blocks, np.ndarray):
            blocks: Blocks = np.pad(self.blocks, ((0, count), (0, 0)))
        else:
            blocks = [*self.blocks, *[[0]] * count]
        return replace(
            self,
            input_ids=_pad(self.input_ids, count, 0),
            positions=_pad(self.positions, count, 0),
            starts=[*self.starts, *range(known + 1, rows + 1)],
            lengths=_pad(self.lengths, count, 1),
            blocks=blocks,
            slots=_pad(self.slots, count, -1),
            logits_rows=np.concatenate((self.logits_rows, np.arange(known, rows))),
            state=None if self.state is None else self.state.pad(count),
        )

    @property
    def columns(self) -> int:
        """Columns of the block table."""
        blocks = self.blocks
        return blocks.shape[1] if isinstance(blocks, np.ndarray) else max(map(len, blocks))

    def plan(
        self, ops: ReferenceOps, width: int = 0, fixed: bool = False, shares: bool = False
    ) -> ForwardBatch:
        """The tensors, on the host. width: of the block table; 0: as wide as the longest sequence needs.
        shares: the batch uses the arrays of rows and lengths themselves, and changes with them.
        """
        _int = _shared if shares else _copied
        attention = AttentionBatch(
            query_starts=self.starts,
            kv_lens=self.lengths,
            block_table=block_table(self.blocks, width),
            slots=_int(self.slots),
        )
        lora = self.lora
        if lora is not None and lora.extras:
            lora = replace(lora, extras=with_logits(lora.extras, list(self.logits_rows)))
        planned, lora = ops.plan(attention, lora, fixed)
        cross = None
        if len(self.cross_blocks):
            table = block_table(self.cross_blocks)
            cross = AttentionBatch(self.starts, self.cross_lengths, table, _copied([]))
        return ForwardBatch(
            input_ids=_int(self.input_ids),
            positions=_int(self.positions),
            attention=planned,
            lora=lora,
            logits_rows=_int(self.logits_rows),
            cross=cross,
            rope_lengths=None if self.rope_lengths is None else _int(self.rope_lengths),
            state=None if self.state is None else self.state.plan(self.starts),
            token_types=None if self.token_types is None else _int(self.token_types),
            pooled=HiddenRows(_int(self.pooled_rows)) if len(self.pooled_rows) else None,
        )

    def fill(self, input_ids: Tensor) -> None:
        """Write the pending tokens over their zeros, on the device. NOT_FINITE becomes 0."""
        if self.pending is None:
            return
        where, tokens = self.pending.where, self.pending.tokens
        if where is None:
            torch.clamp(tokens, min=0, out=input_ids[: len(tokens)])  # one launch
        else:
            input_ids.index_copy_(0, where[0], tokens.index_select(0, where[1]).clamp_(min=0))

    def known(self) -> StepInputs:
        """The same without pending tokens. Waits for them."""
        if self.pending is None:
            return self
        where, ids = self.pending.where, _copied(self.input_ids)
        host = Pending(None if where is None else where.cpu(), self.pending.tokens.cpu())
        replace(self, pending=host).fill(ids)
        return replace(self, input_ids=ids.numpy(), pending=None)


def encoder_inputs(sequences: list[Sequence], tokens_per_block: int) -> StepInputs:
    """Inputs of a pass of the encoder: complete prompts. No logits."""
    lengths = [sequence.num_encoder for sequence in sequences]
    blocks = [sequence.kv.cross_blocks for sequence in sequences]
    spans = [*zip(map(range, lengths), blocks, strict=True)]
    return StepInputs(
        input_ids=[token for sequence in sequences for token in sequence.request.encoder_prompt],
        positions=[position for span, _ in spans for position in span],
        starts=[0, *accumulate(lengths)],
        lengths=lengths,
        blocks=blocks,
        slots=slots_of(spans, tokens_per_block),
        logits_rows=[],
    )


def slots_of(spans: Iterable[tuple[range, list[int]]], size: int) -> list[int]:
    """The slot of each row. spans: positions and KV blocks of each sequence."""
    return [blocks[p // size] * size + p % size for positions, blocks in spans for p in positions]


class KeptInputs:
    """Inputs of the steps of a run, changed in place from one step to the next."""

    def __init__(self, run: DecodeRun, first: StepInputs, tokens_per_block: int) -> None:
        self.run, self._size = run, tokens_per_block
        count = len(run.sequences)
        self._places = np.arange(count)
        self._known = np.zeros(count, np.int64)  # blocks per sequence that are in the table
        self._table = np.zeros((count, 0), np.int32)
        self._columns = self._num_same = 0  # steps until a sequence starts another block
        self._ids, *_ = rows = np.zeros((4, count), np.int64)
        self._moving = rows[1:]  # incremented in each step
        ids, positions, lengths, slots = rows
        state = None if first.state is None else first.state.next_step()
        own = {"input_ids": ids, "positions": positions, "lengths": lengths, "slots": slots, "state": state}
        self._inputs = replace(first, **own)
        self._batch: ForwardBatch | None = None

    def next(self, tokens: Tensor | None) -> StepInputs:
        """Always the same object. tokens: [S] of the previous step, in flight; None: the host has them."""
        if self._num_same:
            self._moving += 1
            self._num_same -= 1
        else:
            self._find_slots()
        self._ids[:] = 0 if tokens is not None else [one.tokens[-1] for one in self.run.sequences]
        self._inputs.pending = None if tokens is None else Pending(None, tokens)
        return self._inputs

    def batch(self, ops: ReferenceOps) -> ForwardBatch:
        """The tensors, on the host: the same batch as long as the block table is the same."""
        if self._batch is None:
            self._batch = self._inputs.plan(ops, shares=True)
        return self._batch

    def _find_slots(self) -> None:
        positions = self.run.positions
        columns, places = np.divmod(positions, self._size)
        for row in np.flatnonzero(columns >= self._known):
            blocks = self.run.sequences[row].kv.blocks
            missing = len(blocks) - self._table.shape[1]
            if missing > 0:
                self._table = np.pad(self._table, ((0, 0), (0, missing)))
            self._table[row, : len(blocks)], self._known[row] = blocks, len(blocks)
            self._columns = 0  # the old table may still be in use, so a new one is needed
        if self._columns != int(columns.max()) + 1:
            self._columns = int(columns.max()) + 1
            self._inputs.blocks, self._batch = self._table[:, : self._columns], None
        slots = self._table[self._places, columns] * np.int64(self._size) + places
        self._moving[:] = positions, positions + 1, slots
        self._num_same = self._size - 1 - int(places.max())


def _pad(values: Ints, count: int, value: int) -> np.ndarray:
    return np.concatenate((values, np.full(count, value)))


def block_table(rows: Blocks, width: int = 0) -> Tensor:
    """[S, width] int32, padded with zeros. width: 0: as wide as the longest row needs."""
    if isinstance(rows, np.ndarray):
        table = np.zeros((len(rows), width or rows.shape[1]), np.int32)
        table[:, : rows.shape[1]] = rows
        return torch.from_numpy(table)
    table = np.zeros((len(rows), width or max(map(len, rows))), np.int32)
    for target, blocks in zip(table, rows, strict=True):
        target[: len(blocks)] = blocks
    return torch.from_numpy(table)


def _copied(values: Ints) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64))


def _shared(values: Ints) -> Tensor:
    """A tensor that shares the memory of an int64 array."""
    return torch.from_numpy(np.asarray(values, np.int64))


class InputMaker:
    """Makes the inputs of a step. max_adapters_in_step: the most distinct adapters of a step so far."""

    def __init__(
        self,
        decoder: Decoder | EncoderDecoder,
        adapters: AdapterStore,
        limits: BatchLimits,
        is_recurrent: bool,
        device: torch.device,
    ) -> None:
        self.max_adapters_in_step = 0
        self._adapters, self._device = adapters, device
        self._tokens_per_block, self._is_recurrent = limits.tokens_per_block, is_recurrent
        self._has_encoder = isinstance(decoder, EncoderDecoder)
        self._vocab_size, self._dtype = decoder.config.vocab_size, decoder.dtype

    def __call__(self, chunks: list[Chunk], wanted: list[range], previous: LaunchedStep | None) -> StepInputs:
        """wanted: positions whose logits are needed. previous: a step still in flight."""
        size, starts = self._tokens_per_block, [0]
        ids, positions, slots, lengths, logits_rows, pooled_rows = (list[int]() for _ in range(6))
        blocks: list[np.ndarray] = []
        for chunk, range_ in zip(chunks, wanted, strict=True):  # one pass: it runs for each decoding row
            sequence, start, count = chunk.sequence, chunk.start, chunk.count
            kv, stop, row = sequence.kv, start + count, len(ids)
            if count == 1:
                ids.append(sequence.tokens[start])
                positions.append(start)
                slots.append(kv.blocks[start // size] * size + start % size)
            else:
                ids += sequence.tokens[start:stop]
                positions += range(start, stop)
                slots += slots_of([(range(start, stop), kv.blocks)], size)
            starts.append(row + count)
            lengths.append(stop)
            blocks.append(kv.first(-(-stop // size)))
            logits_rows += [row + position - start for position in range_]
            if sequence.request.pooling is not None:
                pooled_rows += [row + position - start for position in pooled_positions(chunk)]
        encoded = [c.sequence for c in chunks] if self._has_encoder else []
        virtual = [
            (row + number - chunk.start, number)
            for chunk, row in zip(chunks, starts, strict=False)
            for number in range(chunk.start, min(chunk.sequence.num_virtual, chunk.start + chunk.count))
        ]
        inputs = StepInputs(
            input_ids=[i if 0 <= i < self._vocab_size else 0 for i in ids],
            positions=positions,
            starts=starts,
            lengths=lengths,
            blocks=blocks,
            slots=slots,
            logits_rows=logits_rows,
            pooled_rows=pooled_rows,
            token_types=_token_types(chunks),
            embeddings=self._embeddings(chunks, ids, starts),
            virtual=virtual,
            cross_lengths=[sequence.num_encoder for sequence in encoded],
            cross_blocks=[sequence.kv.cross_blocks for sequence in encoded if sequence.num_encoder],
            pending=self._pending(chunks, ids, starts, previous),
            rope_lengths=_rope_lengths(chunks),
            state=StateRows.of(c.sequence for c in chunks) if self._is_recurrent else None,
        )
        return self.add_adapters(inputs, [(chunk.sequence, chunk.start) for chunk in chunks])

    def _embeddings(
        self, chunks: list[Chunk], ids: list[int], starts: list[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Rows [n] with ids beyond the vocabulary, and their embeddings of the request's prompt table."""
        found: dict[int, np.ndarray] = {}
        for chunk, start, stop in zip(chunks, starts, starts[1:], strict=False):
            table = chunk.sequence.request.prompt_table
            if table is not None:
                places = ((row, ids[row] - self._vocab_size) for row in range(start, stop))
                found |= {row: table[place] for row, place in places if 0 <= place < len(table)}
        if not found:
            return None
        values = torch.from_numpy(np.stack([*found.values()]).astype(np.float32)).to(self._dtype)
        return self._tensor([*found]), values.to(self._device)

    def _pending(
        self, chunks: list[Chunk], ids: list[int], starts: list[int], previous: LaunchedStep | None
    ) -> Pending | None:
        """Rows whose token was sampled by the previous step, with its index among that step's tokens."""
        if previous is None:
            return None
        found = [
            (stop - 1, previous.index_of[chunk.sequence])
            for chunk, stop in zip(chunks, starts[1:], strict=True)
            if chunk.sequence.is_pending and ids[stop - 1] == PENDING
        ]
        return Pending(self._tensor([*zip(*found, strict=True)]), previous.tokens) if found else None

    def add_adapters(self, inputs: StepInputs, parts: Rows[tuple[Sequence, int]]) -> StepInputs:
        """parts: each sequence, with the position of its first row."""
        starts, segments = inputs.starts, list[tuple[int, int, Lease]]()
        for (sequence, position), start, stop in zip(parts, starts, starts[1:], strict=False):
            lease, first = sequence.lease, start + max(0, sequence.acts_from - position)
            if lease is None or first >= stop:
                continue
            if segments and segments[-1][1] == first and segments[-1][2].digest == lease.digest:
                first = segments.pop()[0]
            segments.append((first, stop, lease))
        if not segments:
            return inputs
        count = len({lease.digest for _, _, lease in segments})
        if count > self.max_adapters_in_step:
            self.max_adapters_in_step = count
            if count > 1:
                logger.info("manylora: %d distinct adapters in one step", count)
        inputs.lora = with_virtual(self._adapters.batch(segments), inputs.virtual)
        inputs.adapters = [
            (start, stop, [(one.digest, scale) for one, scale in lease.members])
            for start, stop, lease in segments
        ]
        return inputs

    def _tensor(self, values: list) -> Tensor:
        return upload(values, torch.long, self._device)


def _rope_lengths(chunks: list[Chunk]) -> list[int] | None:
    if all(chunk.sequence.rope_length <= chunk.start + 1 for chunk in chunks):
        return None
    return [
        max(chunk.sequence.rope_length, position + 1)
        for chunk in chunks
        for position in range(chunk.start, chunk.start + chunk.count)
    ]


def pooled_positions(chunk: Chunk) -> range:
    """The positions of a chunk whose hidden states are used."""
    pooling, stop = chunk.sequence.request.pooling, chunk.start + chunk.count
    if pooling is None:
        return range(0)
    if pooling.mode == "last":
        return range(stop - 1, stop) if chunk.ends else range(0)
    if pooling.mode == "cls":
        return range(chunk.start, chunk.start + 1)
    return range(chunk.start, stop)


def _token_types(chunks: list[Chunk]) -> list[int] | None:
    """0 for the first of two texts, 1 for the second. None: all prompts have a single text."""
    firsts = [0 if (pooling := c.sequence.request.pooling) is None else pooling.first for c in chunks]
    if not any(firsts):
        return None
    return [
        int(0 < first <= position)
        for chunk, first in zip(chunks, firsts, strict=True)
        for position in range(chunk.start, chunk.start + chunk.count)
    ]
