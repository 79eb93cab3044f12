"""Runner: launches the forward pass of a step and the sampling of its tokens, and waits for neither."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from manylora.engine.beam import BeamCandidate, best_candidates
from manylora.engine.decode_run import DecodeRun
from manylora.engine.graphs import DecodeGraphs
from manylora.engine.inputs import KeptInputs, Pending, StateRows, StepInputs, encoder_inputs, slots_of
from manylora.engine.kernel_trials import try_variants
from manylora.engine.launched import LaunchedStep, PooledChunk
from manylora.engine.pooler import Pooler, pooled_positions, token_types
from manylora.engine.sampler import Row, Sampler, adjust
from manylora.engine.scheduler import Chunk, Step
from manylora.engine.sequence import PENDING, BeamGroup, Sequence
from manylora.engine.step_messages import (
    COPY_BLOCKS,
    COPY_STATES,
    ENCODE,
    FORWARD,
    copy_message,
    step_message,
)
from manylora.group.leader import Leader
from manylora.kernels.device import Arrival, Device
from manylora.kernels.recurrent import RecurrentState
from manylora.kernels.spec import BatchLimits
from manylora.kernels.transfer import to_device, upload
from manylora.lora.lease import Lease
from manylora.lora.loaded import with_virtual
from manylora.lora.store import AdapterStore
from manylora.model.batch import ForwardBatch
from manylora.model.decoder import Decoder
from manylora.model.encoder import Encoder
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.kv_tensors import KvTensors, copy_blocks
from manylora.stats import GraphStats

logger = logging.getLogger("manylora")

PLAIN_USES = 1  # of a decode step's shape before it is recorded


class Runner:
    """Owns the decoder, the KV tensor and, of a model with recurrent layers, their states.

    The sequences of a batch are ordered by adapter: the rows of an adapter are contiguous, and those of the
    base model come first; but a chunk in which an adapter begins to act has both, in the order of its tokens.
    """

    def __init__(
        self,
        decoder: Decoder | EncoderDecoder | Encoder,
        kv: KvTensors,
        device: Device,
        adapters: AdapterStore,
        limits: BatchLimits,
        leader: Leader | None = None,
        states: RecurrentState | None = None,
    ) -> None:
        self.max_adapters_in_step = 0
        self._decoder = decoder
        self._kv = kv
        self._states = states
        self._device = device
        self._ops = device.ops
        self._adapters = adapters
        self._limits = limits
        self._leader = leader
        self._tokens_per_block = limits.tokens_per_block
        self._graphs: DecodeGraphs | None = None
        self._kept: KeptInputs | None = None  # of the step before,
        self._sampler: Sampler | None = None  # as this
        self._ops.reserve(limits, device.torch)
        self._vocab_size = decoder.config.vocab_size
        self._pooler = Pooler(decoder.classifier, decoder.head_layer, decoder.dense)

    def graph_stats(self) -> GraphStats:
        graphs = self._graphs
        if graphs is None:
            return GraphStats()
        return GraphStats(graphs.num_recorded, graphs.num_replayed, graphs.num_plain)

    def record_decoding(self, max_graphs: int, warm: bool = True) -> None:
        """From now on run decode steps as recorded CUDA graphs, keeping at most max_graphs of them.

        Only on a device with a `capture`. warm: record those of the base model now.
        """
        capture = self._device.capture
        assert capture is not None, "this device records nothing"
        self._graphs = DecodeGraphs(
            self._forward,
            self._ops,
            capture,
            self._device.torch,
            self._limits,
            max_graphs,
            PLAIN_USES,
        )
        if warm:
            self._graphs.warm(recurrent=self._states is not None)

    def try_variants(self) -> None:
        """Let operations that have several variants measure and choose one now, rather than in a step."""
        if isinstance(self._decoder, Decoder) and not self._decoder.config.bidirectional:
            self._device.activate()
            modules = self._adapters.modules.values()
            try_variants(self._decoder, self._kv, self._ops, modules, self._limits, self._device.torch)

    def launch(self, step: Step, previous: LaunchedStep | None = None) -> LaunchedStep:
        """previous: still in flight; pending tokens of its sequences are read from it on the device."""
        self._device.activate()
        kept, run = self._kept, step.run
        if run is not None and kept is not None and kept.run is run:
            return self._launch_next(step, run, previous)
        return self._launch_anew(step, previous)

    def _launch_next(self, step: Step, run: DecodeRun, previous: LaunchedStep | None) -> LaunchedStep:
        """Of a run whose step before was launched, and whose first tables are kept."""
        kept, sampler = self._kept, self._sampler
        assert kept is not None and sampler is not None
        tokens = None if previous is None else previous.tokens
        inputs = kept.next(tokens)
        logits = self._logits(inputs)
        if sampler.sees_tokens and tokens is None:
            tokens = self._tensor(list(inputs.input_ids))
        sampler.go_on(inputs.lengths, tokens if sampler.sees_tokens else None)
        if not run.can_run_ahead:  # as those whose logits are returned cannot
            self._return_logits(logits, sampler.rows)
        return LaunchedStep(step, sampler.rows, *sampler(logits))

    def _launch_anew(self, step: Step, previous: LaunchedStep | None) -> LaunchedStep:
        chunks = [one for chunk in step.chunks for one in _one_by_one(chunk)]
        chunks.sort(key=lambda c: c.sequence.place(c.start, c.start + c.count))
        wanted = [_wanted(chunk) for chunk in chunks]
        self._encode([chunk.sequence for chunk in chunks if chunk.num_encoded])
        inputs = self._inputs(chunks, wanted, previous)
        self._kept = None if step.run is None else KeptInputs(step.run, inputs, self._tokens_per_block)
        logits = self._logits(inputs)
        indices, rows = list[int](), list[Row]()  # rows of `logits` to sample from
        beams: dict[BeamGroup, list[tuple[int, Row]]] = {}
        pooled = [] if inputs.hidden is None else self._pool(chunks, inputs, inputs.hidden)
        first = 0
        for chunk, positions in zip(chunks, wanted, strict=True):
            if chunk.sequence.request.params.return_context_logits:
                self._keep_context(chunk, positions, logits[first : first + len(positions)])
            for index, position in enumerate(positions, first):
                sequence = chunk.sequence
                if chunk.samples and position >= len(sequence.tokens) - 1 - sequence.num_draft:
                    if sequence.beams is not None:
                        beams.setdefault(sequence.beams, []).append((index, (sequence, position + 1)))
                    else:
                        indices.append(index)
                        rows.append((sequence, position + 1))
            first += len(positions)
        candidates = {group: self._candidates(logits, members, group) for group, members in beams.items()}
        if not rows:
            return LaunchedStep(step, [], logits[:0, 0], None, candidates, pooled)
        if len(rows) < logits.shape[0]:
            logits = logits.index_select(0, self._tensor(indices))
        self._return_logits(logits, rows)
        pending = self._last_tokens(rows, previous)
        self._sampler = Sampler(rows, logits.shape[-1], logits.device, pending)
        return LaunchedStep(step, rows, *self._sampler(logits), candidates, pooled)

    def _pool(self, chunks: list[Chunk], inputs: StepInputs, hidden: Tensor) -> list[PooledChunk]:
        extras = {} if inputs.lora is None else {one.start: one.values for one in inputs.lora.extras}
        # Of adapters that act alone, as those with extras do.
        starts = {members[0][0]: start for start, _, members in inputs.adapters if len(members) == 1}
        found, first = [], 0
        for chunk in chunks:
            count = len(pooled_positions(chunk))
            if count:
                lease = chunk.sequence.lease
                own = extras.get(starts.get(lease.digest, -1), {}) if lease is not None else {}
                values = self._pooler(chunk, hidden[first : first + count], own)
                if values is not None:
                    found.append(PooledChunk(chunk, Arrival(values)))
            first += count
        return found

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy keys and values of whole blocks. pairs: (from, to); no block is in both columns."""
        if pairs:
            if self._leader is not None:
                self._leader.tell(copy_message(COPY_BLOCKS, pairs))
            source, target = (self._tensor(list(side)) for side in zip(*pairs, strict=True))
            copy_blocks(self._kv, source, target)

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        """Copy recurrent states. pairs: (from, to) slots; no slot is in both columns."""
        if pairs and self._states is not None:
            if self._leader is not None:
                self._leader.tell(copy_message(COPY_STATES, pairs))
            source, target = (self._tensor(list(side)) for side in zip(*pairs, strict=True))
            self._states.copy(source, target)

    @staticmethod
    def _return_logits(logits: Tensor, rows: Rows[Row]) -> None:
        """Keep those that requests ask for. This waits for the device."""
        for values, (sequence, _) in zip(logits, rows, strict=True):
            if sequence.request.params.return_generation_logits:
                sequence.output.generation_logits.append(_numpy(values))

    def _last_tokens(self, rows: Rows[Row], previous: LaunchedStep | None) -> Tensor | None:
        """As `Sampler` has them pending."""
        found = [
            (row, previous.index_of(sequence))
            for row, (sequence, length) in enumerate(rows)
            if previous is not None and sequence.is_pending and sequence.tokens[length - 1] == PENDING
            if sequence.request.params.counts_tokens
        ]
        if previous is None or not found:
            return None
        where = self._tensor([*zip(*found, strict=True)])
        tokens = torch.full((len(rows),), -1, device=self._device.torch)
        return tokens.index_copy_(0, where[0], previous.tokens.index_select(0, where[1]))

    @staticmethod
    def _candidates(logits: Tensor, members: list[tuple[int, Row]], group: BeamGroup) -> list[BeamCandidate]:
        """Of one beam search; empty where logits are not finite. This waits for the device."""
        order = {sequence: i for i, sequence in enumerate(group.beams)}
        members.sort(key=lambda member: order[member[1][0]])
        picked = logits[[index for index, _ in members]]
        finite = adjust(picked, [row for _, row in members])
        log_probs = torch.log_softmax(picked, dim=-1)
        return best_candidates(log_probs, group) if bool(finite.all()) else []

    @staticmethod
    def _keep_context(chunk: Chunk, positions: range, logits: Tensor) -> None:
        sequence = chunk.sequence
        count = min(positions.stop, sequence.num_prompt) - positions.start
        if count <= 0:
            return
        total, first = sequence.num_prompt - sequence.num_virtual, positions.start - sequence.num_virtual
        if sequence.output.context_logits is None:
            sequence.output.context_logits = np.empty((total, logits.shape[-1]), np.float32)
        sequence.output.context_logits[first : first + count] = _numpy(logits[:count])

    def _encode(self, sequences: list[Sequence]) -> None:
        """Run the encoder for sequences that start, or start again after a preemption."""
        if not sequences:
            return
        assert isinstance(self._decoder, EncoderDecoder)
        inputs = encoder_inputs(sequences, self._tokens_per_block)
        inputs = self._with_adapters(inputs, [(sequence, 0) for sequence in sequences])
        if self._leader is not None:
            self._leader.tell(step_message(ENCODE, inputs))
        batch = inputs.plan(self._ops)
        self._decoder.encode(to_device(batch, self._device.torch), self._kv)
        for sequence in sequences:
            sequence.kv.is_encoded = True

    def _logits(self, inputs: StepInputs) -> Tensor:
        if self._graphs is not None and inputs.decodes:
            logits = self._graphs.run(inputs)
            if logits is not None:
                return logits
        if self._leader is not None:
            self._leader.tell(step_message(FORWARD, inputs))
        batch = inputs.plan(self._ops)
        if inputs.embeddings is not None:
            batch = replace(batch, embeddings=inputs.embeddings)
        moved = to_device(batch, self._device.torch)
        inputs.fill(moved.input_ids)
        logits = self._forward(moved)
        if moved.pooled is not None:
            inputs.hidden = moved.pooled.hidden
        return logits

    def _forward(self, batch: ForwardBatch) -> Tensor:
        if isinstance(self._decoder, Decoder):
            return self._decoder.forward(batch, self._kv, self._states)
        return self._decoder.forward(batch, self._kv)

    def _inputs(self, chunks: list[Chunk], wanted: list[range], previous: LaunchedStep | None) -> StepInputs:
        size, starts = self._tokens_per_block, [0]
        ids, positions, slots, lengths, logits_rows, pooled_rows = (list[int]() for _ in range(6))
        blocks: list[np.ndarray] = []
        for chunk, range_ in zip(chunks, wanted, strict=True):  # one pass: it runs for each row that decodes
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
        encoded = [c.sequence for c in chunks] if isinstance(self._decoder, EncoderDecoder) else []
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
            state=StateRows.of(c.sequence for c in chunks) if self._states is not None else None,
        )
        return self._with_adapters(inputs, [(chunk.sequence, chunk.start) for chunk in chunks])

    def _embeddings(
        self, chunks: list[Chunk], ids: list[int], starts: list[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Rows [n] whose ids are beyond the vocabulary, and their embeddings from the request's table."""
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
        values = torch.from_numpy(np.stack(vectors).astype(np.float32)).to(self._decoder.dtype)
        return self._tensor(rows), values.to(self._device.torch)

    def _pending(
        self, chunks: list[Chunk], ids: list[int], starts: list[int], previous: LaunchedStep | None
    ) -> Pending | None:
        """Rows whose token the previous step has sampled, and its index among the tokens of that step."""
        if previous is None:
            return None
        found = [
            (stop - 1, previous.index_of(chunk.sequence))
            for chunk, stop in zip(chunks, starts[1:], strict=True)
            if chunk.sequence.is_pending and ids[stop - 1] == PENDING
        ]
        return Pending(self._tensor([*zip(*found, strict=True)]), previous.tokens) if found else None

    def _with_adapters(self, inputs: StepInputs, parts: Rows[tuple[Sequence, int]]) -> StepInputs:
        """parts: each sequence, and the position of the first of its rows."""
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
            logger.info("manylora: %d distinct adapters in one step", count)
        inputs.lora = with_virtual(self._adapters.batch(segments), inputs.virtual)
        inputs.adapters = [
            (start, stop, [(one.digest, scale) for one, scale in lease.members])
            for start, stop, lease in segments
        ]
        return inputs

    def _tensor(self, values: list, dtype: torch.dtype = torch.long) -> Tensor:
        return upload(values, dtype, self._device.torch)


def _one_by_one(chunk: Chunk) -> list[Chunk]:
    """A draft's rows apart, each as a sequence of its own that decodes one token: their keys and values are
    stored before any is attended, and each gets the bits that it had without the draft."""
    if chunk.in_context or not chunk.sequence.num_draft:
        return [chunk]
    return [replace(chunk, start=chunk.start + i, count=1) for i in range(chunk.count)]


def _wanted(chunk: Chunk) -> range:
    """The positions of a chunk whose logits are needed."""
    sequence, stop = chunk.sequence, chunk.start + chunk.count
    if not chunk.in_context and (chunk.count == 1 or not sequence.num_draft):
        return range(stop - chunk.samples, stop)
    in_prompt = chunk.start < sequence.num_prompt and not sequence.num_output
    if sequence.request.params.return_context_logits and in_prompt:
        return range(min(max(chunk.start, sequence.num_virtual), stop), stop)
    return range(stop - 1 - sequence.num_draft, stop) if chunk.samples else range(stop, stop)


def _virtual(chunks: list[Chunk], starts: list[int]) -> list[tuple[int, int]]:
    """Rows that are virtual tokens of their adapter, and which of them."""
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


def _numpy(logits: Tensor) -> np.ndarray:
    return logits.to("cpu", torch.float32, copy=True).numpy()
