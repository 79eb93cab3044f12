"""Runner: launches the forward pass of a step and the sampling of its tokens, and waits for neither."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from manylora.adapters.cache.store import AdapterStore
from manylora.engine.graphs import DecodeGraphs
from manylora.engine.inputs import InputMaker, KeptInputs, StepInputs, encoder_inputs, pooled_positions
from manylora.engine.sampler import Row, Sampler, adjust
from manylora.engine.scheduler import Chunk, Step
from manylora.engine.sequence import PENDING, BeamGroup, Sequence
from manylora.engine.step import BeamCandidate, LaunchedStep, Pairs, best_candidates
from manylora.engine.step_messages import COPY_BLOCKS, COPY_STATES, ENCODE, FORWARD, step_message
from manylora.engine.warmup import compile_kernels
from manylora.kernels.device import Arrival, Device
from manylora.kernels.recurrent import RecurrentState
from manylora.kernels.spec import BatchLimits, Extra
from manylora.kernels.transfer import to_device, upload
from manylora.model.batch import ForwardBatch, KvTensors, copy_blocks
from manylora.model.decoder import Decoder
from manylora.model.encoder_decoder import EncoderDecoder
from manylora.model.heads import ClassificationHead
from manylora.ranks.channel import Message
from manylora.ranks.leader import Leader
from manylora.stats import GraphStats

PLAIN_USES = 1  # of a decode step's shape before it is recorded


class Runner:
    """Owns the decoder, the KV tensor and, of a model with recurrent layers, their states.

    The sequences of a batch are ordered by adapter: the rows of an adapter are contiguous, and those of the
    base model come first; but a chunk in which an adapter begins to act has both, in the order of its tokens.
    """

    def __init__(
        self,
        decoder: Decoder | EncoderDecoder,
        kv: KvTensors,
        device: Device,
        adapters: AdapterStore,
        limits: BatchLimits,
        leader: Leader | None = None,
        states: RecurrentState | None = None,
    ) -> None:
        self._decoder, self._kv, self._states = decoder, kv, states
        self._device, self._ops = device, device.ops
        self._adapters, self._limits, self._leader = adapters, limits, leader
        self._graphs: DecodeGraphs | None = None
        self._kept: KeptInputs | None = None  # of the last step, if it was one of a run
        self._sampler: Sampler | None = None  # of the last step
        self._ops.reserve(limits, device.torch)
        self.inputs = InputMaker(decoder, adapters, limits, states is not None, device.torch)
        self._pooler = Pooler(decoder)

    def graph_stats(self) -> GraphStats:
        if self._graphs is None:
            return GraphStats()
        return GraphStats(self._graphs.num_recorded, self._graphs.num_replayed, self._graphs.num_plain)

    def record_decoding(self, max_graphs: int) -> None:
        """Run decode steps as CUDA graphs from now on. The base model's are recorded now."""
        capture, device = self._device.capture, self._device.torch
        assert capture is not None, "this device records nothing"
        self._graphs = DecodeGraphs(
            self._forward, self._ops, capture, device, self._limits, max_graphs, PLAIN_USES
        )
        self._graphs.warm(recurrent=self._states is not None)

    def compile_kernels(self) -> None:
        """Compile the kernels that steps may launch now, so that no step waits for the compiler."""
        if isinstance(self._decoder, Decoder) and not self._decoder.config.bidirectional:
            self._device.activate()
            modules = self._adapters.modules.values()
            compile_kernels(self._decoder, self._kv, self._ops, modules, self._limits, self._device.torch)

    def launch(self, step: Step, previous: LaunchedStep | None = None) -> LaunchedStep:
        """previous: still in flight; pending tokens of its sequences are read from it on the device."""
        self._device.activate()
        kept, run, sampler = self._kept, step.run, self._sampler
        if run is None or kept is None or kept.run is not run:
            return self._launch_anew(step, previous)
        # After the first step of a run, its inputs and sampler are used again.
        assert sampler is not None
        tokens = None if previous is None else previous.tokens
        inputs = kept.next(tokens)
        logits = self._logits(inputs, kept)
        if sampler.needs_tokens and tokens is None:
            tokens = self._tensor(list(inputs.input_ids))
        sampler.advance(np.asarray(inputs.lengths).tolist(), tokens if sampler.needs_tokens else None)
        if not run.can_run_ahead:  # requests that return logits cannot run ahead
            self._return_logits(logits, sampler.rows)
        return LaunchedStep(step, sampler.rows, *sampler(logits, inputs.best))

    def _launch_anew(self, step: Step, previous: LaunchedStep | None) -> LaunchedStep:
        chunks = [one for chunk in step.chunks for one in _one_by_one(chunk)]
        chunks.sort(key=lambda c: c.sequence.batch_key(c.start, c.start + c.count))
        wanted = [_wanted_positions(chunk) for chunk in chunks]
        self._encode([chunk.sequence for chunk in chunks if chunk.num_encoded])
        inputs = self.inputs(chunks, wanted, previous)
        kept = None if step.run is None else KeptInputs(step.run, inputs, self._limits.tokens_per_block)
        self._kept, logits = kept, self._logits(inputs)
        indices, rows = list[int](), list[Row]()  # rows of `logits` to sample from
        beams: dict[BeamGroup, list[tuple[int, Row]]] = {}
        pooled = [] if inputs.hidden is None else self._pool(chunks, inputs, inputs.hidden)
        first = 0
        for chunk, positions in zip(chunks, wanted, strict=True):
            sequence = chunk.sequence
            if sequence.request.params.return_context_logits:
                _keep_context_logits(sequence, positions, logits[first : first + len(positions)])
            for index, position in enumerate(positions, first):
                if not chunk.samples or position < len(sequence.tokens) - 1 - sequence.num_draft:
                    continue
                if sequence.beams is not None:
                    beams.setdefault(sequence.beams, []).append((index, (sequence, position + 1)))
                else:
                    indices.append(index)
                    rows.append((sequence, position + 1))
            first += len(positions)
        candidates = {group: _candidates(logits, members, group) for group, members in beams.items()}
        if not rows:
            return LaunchedStep(step, [], logits[:0, 0], None, candidates, pooled)
        best = inputs.best
        if len(rows) < logits.shape[0]:
            best, logits = None, logits.index_select(0, self._tensor(indices))
        self._return_logits(logits, rows)
        pending = self._last_tokens(rows, previous)
        self._sampler = Sampler(rows, logits.shape[-1], logits.device, pending, self._ops.best)
        return LaunchedStep(step, rows, *self._sampler(logits, best), candidates, pooled)

    def _pool(self, chunks: list[Chunk], inputs: StepInputs, hidden: Tensor) -> list[tuple[Chunk, Arrival]]:
        extras = {} if inputs.lora is None else {one.start: one.values for one in inputs.lora.extras}
        # Adapters with extras always act alone.
        starts = {members[0][0]: start for start, _, members in inputs.adapters if len(members) == 1}
        found, first = [], 0
        for chunk in chunks:
            count = len(pooled_positions(chunk))
            if count:
                lease = chunk.sequence.lease
                own = extras.get(starts.get(lease.digest, -1), {}) if lease is not None else {}
                values = self._pooler(chunk, hidden[first : first + count], own)
                if values is not None:
                    found.append((chunk, Arrival(values)))
            first += count
        return found

    def copy(self, blocks: Pairs, states: Pairs) -> None:
        """Copy keys and values of blocks, and recurrent states: (from, to); nothing is in both columns."""
        for what, pairs in ((COPY_BLOCKS, blocks), (COPY_STATES, states)):
            if not pairs:
                continue
            if self._leader is not None:
                self._leader.tell(Message(what, {"pairs": pairs}))
            source, target = (self._tensor(list(column)) for column in zip(*pairs, strict=True))
            if what == COPY_BLOCKS:
                copy_blocks(self._kv, source, target)
            elif self._states is not None:
                self._states.copy(source, target)

    @staticmethod
    def _return_logits(logits: Tensor, rows: Rows[Row]) -> None:
        """Keep the logits that requests ask for. This waits for the device."""
        for values, (sequence, _) in zip(logits, rows, strict=True):
            if sequence.request.params.return_generation_logits:
                sequence.output.generation_logits.append(_numpy(values))

    def _last_tokens(self, rows: Rows[Row], previous: LaunchedStep | None) -> Tensor | None:
        """The `pending` tokens of a `Sampler`."""
        found = [
            (row, previous.index_of[sequence])
            for row, (sequence, length) in enumerate(rows)
            if previous is not None and sequence.is_pending and sequence.tokens[length - 1] == PENDING
            if sequence.request.params.counts_tokens
        ]
        if previous is None or not found:
            return None
        where = self._tensor([*zip(*found, strict=True)])
        tokens = torch.full((len(rows),), -1, device=self._device.torch)
        return tokens.index_copy_(0, where[0], previous.tokens.index_select(0, where[1]))

    def _encode(self, sequences: list[Sequence]) -> None:
        """Run the encoder for sequences that start, or start again after a preemption."""
        if not sequences:
            return
        assert isinstance(self._decoder, EncoderDecoder)
        inputs = encoder_inputs(sequences, self._limits.tokens_per_block)
        inputs = self.inputs.add_adapters(inputs, [(sequence, 0) for sequence in sequences])
        if self._leader is not None:
            self._leader.tell(step_message(ENCODE, inputs))
        batch = inputs.plan(self._ops)
        self._decoder.encode(to_device(batch, self._device.torch), self._kv)
        for sequence in sequences:
            sequence.kv.is_encoded = True

    def _logits(self, inputs: StepInputs, kept: KeptInputs | None = None) -> Tensor:
        """Run the decoder: logits [rows, vocab] float32. kept: the source of the inputs, if any."""
        if self._graphs is not None and inputs.decodes:
            logits = self._graphs.run(inputs)
            if logits is not None:
                return logits
        if self._leader is not None:
            self._leader.tell(step_message(FORWARD, inputs))
        # A batch that is used again overwrites its results, so not while a step is in flight.
        if kept is not None and inputs.pending is None and self._ops.reads_tables:
            batch = kept.batch(self._ops)
            logits = self._forward(batch)
            inputs.best = batch.best.tokens
            return logits
        batch = inputs.plan(self._ops)
        if inputs.embeddings is not None:
            batch = replace(batch, embeddings=inputs.embeddings)
        moved = to_device(batch, self._device.torch)
        inputs.fill(moved.input_ids)
        logits = self._forward(moved)
        inputs.best = moved.best.tokens
        if moved.pooled is not None:
            inputs.hidden = moved.pooled.hidden
        return logits

    def _forward(self, batch: ForwardBatch) -> Tensor:
        if isinstance(self._decoder, Decoder):
            return self._decoder.forward(batch, self._kv, self._states)
        return self._decoder.forward(batch, self._kv)

    def _tensor(self, values: list) -> Tensor:
        return upload(values, torch.long, self._device.torch)


def _one_by_one(chunk: Chunk) -> list[Chunk]:
    """The rows of a draft as chunks that decode one token each: results as without the draft."""
    if chunk.in_context or not chunk.sequence.num_draft:
        return [chunk]
    return [replace(chunk, start=chunk.start + i, count=1) for i in range(chunk.count)]


def _wanted_positions(chunk: Chunk) -> range:
    """The positions of a chunk whose logits are needed."""
    sequence, stop = chunk.sequence, chunk.start + chunk.count
    if not chunk.in_context and (chunk.count == 1 or not sequence.num_draft):
        return range(stop - chunk.samples, stop)
    in_prompt = chunk.start < sequence.num_prompt and not sequence.num_output
    if sequence.request.params.return_context_logits and in_prompt:
        return range(min(max(chunk.start, sequence.num_virtual), stop), stop)
    return range(stop - 1 - sequence.num_draft, stop) if chunk.samples else range(stop, stop)


def _keep_context_logits(sequence: Sequence, positions: range, logits: Tensor) -> None:
    count = min(positions.stop, sequence.num_prompt) - positions.start
    if count <= 0:
        return
    total, first = sequence.num_prompt - sequence.num_virtual, positions.start - sequence.num_virtual
    if sequence.output.context_logits is None:
        sequence.output.context_logits = np.empty((total, logits.shape[-1]), np.float32)
    sequence.output.context_logits[first : first + count] = _numpy(logits[:count])


def _candidates(logits: Tensor, members: list[tuple[int, Row]], group: BeamGroup) -> list[BeamCandidate]:
    """Candidates of one beam search. Empty if logits are not finite. This waits for the device."""
    order = {sequence: i for i, sequence in enumerate(group.beams)}
    members.sort(key=lambda member: order[member[1][0]])
    picked = logits[[index for index, _ in members]]
    finite = adjust(picked, [row for _, row in members])
    log_probs = torch.log_softmax(picked, dim=-1)
    return best_candidates(log_probs, group) if bool(finite.all()) else []


def _numpy(logits: Tensor) -> np.ndarray:
    return logits.to("cpu", torch.float32, copy=True).numpy()


class Pooler:
    """Turns the hidden states of a prompt into the result of a request for pooled outputs."""

    def __init__(self, decoder: Decoder | EncoderDecoder) -> None:
        self._decoder = decoder
        self._sums: WeakKeyDictionary[Sequence, Tensor] = WeakKeyDictionary()  # for prompts in several chunks

    def __call__(self, chunk: Chunk, x: Tensor, extras: Mapping[str, Extra]) -> Tensor | None:
        """x [P, hidden], of `pooled_positions`. extras: of the chunk's adapter. Returns [n] float32, or [P,
        n] for all tokens. None: the prompt continues in another chunk.
        """
        sequence, pooling = chunk.sequence, chunk.sequence.request.pooling
        assert pooling is not None
        if pooling.mode == "mean" and not (chunk.ends and chunk.start == 0):
            total = x.float().sum(0)
            if chunk.start:
                total += self._sums[sequence]
            self._sums[sequence] = total
            if not chunk.ends:
                return None
            x = (total / sequence.num_prompt).to(x.dtype)[None]
        elif pooling.mode == "mean":
            x = x.float().mean(0, keepdim=True).to(x.dtype)
        if pooling.head:
            activation = self._decoder.config.head_dense_activation  # of an adapter's head of two layers
            head = ClassificationHead.of_extras(extras, activation) or self._decoder.classifier
            assert head is not None, "checked when the request was taken"
            layer = self._decoder.head_layer
            if layer is not None and head.dense is None and (layer.config.each or pooling.mode != "all"):
                x = layer(x)
            x = head(x)
        elif pooling.mode != "all":
            for one in self._decoder.dense:
                x = one(x.float())
        return x.float() if pooling.mode == "all" else x[0].float()
