"""InputMaker: builds the inputs of a forward pass from the chunks of a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from manylora.engine.inputs import Pending, StateRows, StepInputs, slots_of
from manylora.engine.launched import LaunchedStep
from manylora.engine.pooler import pooled_positions, token_types
from manylora.engine.scheduler import Chunk
from manylora.engine.sequence import PENDING, Sequence
from manylora.kernels.transfer import upload
from manylora.lora.lease import Lease
from manylora.lora.loaded import with_virtual
from manylora.lora.store import AdapterStore
from manylora.model.decoder import Decoder
from manylora.model.encoder import Encoder
from manylora.model.encoder_decoder import EncoderDecoder

logger = logging.getLogger("manylora")


class InputMaker:
    """is_recurrent: whether the model has recurrent layers. device: for tensors that are not copied with the
    rest.
    """

    def __init__(
        self,
        decoder: Decoder | EncoderDecoder | Encoder,
        adapters: AdapterStore,
        tokens_per_block: int,
        is_recurrent: bool,
        device: torch.device,
    ) -> None:
        self.max_adapters_in_step = 0
        self._adapters, self._device = adapters, device
        self._tokens_per_block, self._is_recurrent = tokens_per_block, is_recurrent
        self._has_encoder = isinstance(decoder, EncoderDecoder)
        self._vocab_size, self._dtype = decoder.config.vocab_size, decoder.dtype

    def __call__(self, chunks: list[Chunk], wanted: list[range], previous: LaunchedStep | None) -> StepInputs:
        """wanted: positions whose logits are needed. previous: a step still in flight."""
        size, starts = self._tokens_per_block, [0]
        ids, positions, slots, lengths, logits_rows, pooled_rows = (list[int]() for _ in range(6))
        blocks: list[np.ndarray] = []
        for chunk, range_ in zip(
            chunks, wanted, strict=True
        ):  # a single pass, because it runs per decoding row
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
        inputs = StepInputs(
            input_ids=[i if 0 <= i < self._vocab_size else 0 for i in ids],
            positions=positions,
            starts=starts,
            lengths=lengths,
            blocks=blocks,
            slots=slots,
            logits_rows=logits_rows,
            pooled_rows=pooled_rows,
            token_types=token_types(chunks),
            embeddings=self._embeddings(chunks, ids, starts),
            virtual=_virtual(chunks, starts),
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
        """Rows [n] whose ids are beyond the vocabulary, and their embeddings from the request's prompt
        table.
        """
        rows: list[int] = []
        vectors: list[np.ndarray] = []
        for chunk, start, stop in zip(chunks, starts, starts[1:], strict=False):
            table = chunk.sequence.request.prompt_table
            if table is not None:
                for row in range(start, stop):
                    if 0 <= ids[row] - self._vocab_size < len(table):
                        rows.append(row)
                        vectors.append(table[ids[row] - self._vocab_size])
        if not rows:
            return None
        values = torch.from_numpy(np.stack(vectors).astype(np.float32)).to(self._dtype)
        return self._tensor(rows), values.to(self._device)

    def _pending(
        self, chunks: list[Chunk], ids: list[int], starts: list[int], previous: LaunchedStep | None
    ) -> Pending | None:
        """Rows whose token was sampled by the previous step, with its index among that step's tokens."""
        if previous is None:
            return None
        found = [
            (stop - 1, previous.index_of(chunk.sequence))
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


def one_by_one(chunk: Chunk) -> list[Chunk]:
    """Split the rows of a draft into sequences that decode one token each.

    Keys and values are stored before attention, so each row gets exactly the result that it has without the
    draft.
    """
    if chunk.in_context or not chunk.sequence.num_draft:
        return [chunk]
    return [replace(chunk, start=chunk.start + i, count=1) for i in range(chunk.count)]


def wanted_positions(chunk: Chunk) -> range:
    """The positions of a chunk whose logits are needed."""
    sequence, stop = chunk.sequence, chunk.start + chunk.count
    if not chunk.in_context and (chunk.count == 1 or not sequence.num_draft):
        return range(stop - chunk.samples, stop)
    in_prompt = chunk.start < sequence.num_prompt and not sequence.num_output
    if sequence.request.params.return_context_logits and in_prompt:
        return range(min(max(chunk.start, sequence.num_virtual), stop), stop)
    return range(stop - 1 - sequence.num_draft, stop) if chunk.samples else range(stop, stop)


def _virtual(chunks: list[Chunk], starts: list[int]) -> list[tuple[int, int]]:
    """Rows that are virtual tokens of their adapter, and their token numbers."""
    return [
        (row + number - chunk.start, number)
        for chunk, row in zip(chunks, starts, strict=False)
        for number in range(chunk.start, min(chunk.sequence.num_virtual, chunk.start + chunk.count))
    ]


def _rope_lengths(chunks: list[Chunk]) -> list[int] | None:
    if all(chunk.sequence.rope_length <= chunk.start + 1 for chunk in chunks):
        return None
    return [
        max(chunk.sequence.rope_length, position + 1)
        for chunk in chunks
        for position in range(chunk.start, chunk.start + chunk.count)
    ]
