"""LaunchedStep: a step whose forward pass was launched. `wait` returns its results."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from manylora.engine.beam import BeamCandidate
from manylora.engine.sampler import Row
from manylora.engine.scheduler import Chunk, Step
from manylora.engine.sequence import BeamGroup, Sequence
from manylora.kernels.device import Arrival

SampledTokens = dict[Sequence, list[tuple[int, float | None]]]
"""(token, log probability) pairs of each sampled sequence: more than one if draft tokens were accepted.
NOT_FINITE replaces a token whose logits are not finite.
"""


@dataclass(frozen=True)
class PooledChunk:
    """values: float32, being copied to the host; see `Sequence.add_pooled`."""

    chunk: Chunk
    values: Arrival


class LaunchedStep:
    """Created by the runner. tokens, log_probs: [D] on the device, one per entry of `rows`; see
    `sampler.sample`. A step without tokens must be waited for, too, because it reads adapters.

    pooled: results of requests for pooled outputs.
    candidates: of each beam search in the step; empty if the logits are not finite.
    assumed_done: set by the engine if the scheduler counted the step before its results are known.
    """

    def __init__(
        self,
        step: Step,
        rows: Rows[Row],
        tokens: Tensor,
        log_probs: Tensor | None,
        candidates: dict[BeamGroup, list[BeamCandidate]] | None = None,
        pooled: Rows[PooledChunk] = (),
    ) -> None:
        self.step = step
        self.tokens = tokens
        self.candidates = candidates or {}
        self.pooled = pooled
        self.assumed_done = False
        self._rows = rows
        self._tokens = Arrival(tokens)
        self._log_probs = Arrival(log_probs) if log_probs is not None else None

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next step can be launched before the tokens of this one are known."""
        if self.step.run is not None:
            return self.step.run.can_run_ahead
        sampled = (chunk.sequence for chunk in self.step.chunks if chunk.samples)
        return all(sequence.can_run_ahead for sequence in sampled if not sequence.finished)

    def index_of(self, sequence: Sequence) -> int:
        """Index into `tokens` of the sequence's next token."""
        return self._indices[sequence]

    @cached_property
    def _indices(self) -> dict[Sequence, int]:
        return {sequence: index for index, (sequence, _) in enumerate(self._rows)}

    def wait(self) -> SampledTokens:
        """Wait until the tokens are on the host. Raises the device's errors."""
        sampled: SampledTokens = {}
        tokens = self._tokens.wait().tolist()
        log_probs = self._log_probs.wait().tolist() if self._log_probs else [None] * len(tokens)
        for (sequence, length), token, log_prob in zip(self._rows, tokens, log_probs, strict=True):
            if not sequence.num_draft:
                sampled[sequence] = [(token, log_prob if sequence.request.params.return_log_probs else None)]
                continue
            accepted = sampled.setdefault(sequence, [])
            position = length - (len(sequence.tokens) - sequence.num_draft - sequence.is_pending)
            # A later token counts only if the draft tokens before it are those that the model has chosen.
            follows = 0 < position == len(accepted) and accepted[-1][0] == sequence.tokens[length - 1]
            if position == 0 or follows:
                wanted = sequence.request.params.return_log_probs
                accepted.append((token, log_prob if wanted else None))
        return sampled


class FailedStep(LaunchedStep):
    """A step whose launch raised an error; `wait` raises it."""

    def __init__(self, step: Step, error: Exception) -> None:
        super().__init__(step, [], torch.empty(0, dtype=torch.long), None)
        self._error = error

    def wait(self) -> SampledTokens:
        raise self._error
