"""Flight: a step that was launched, and what it decided as soon as that is on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from manylora.engine.beam import BeamGroup, Choice
from manylora.engine.sampler import Row
from manylora.engine.scheduler import Chunk, Step
from manylora.kernels.device import Arrival

__all__ = ["Drawn", "Flight", "Outcome"]

Drawn = tuple[Chunk, Row]
"""Of a token that was drawn: the chunk it belongs to, and as in `sampler.Row`."""


@dataclass
class Outcome:
    """What one forward pass decided.

    tokens:  of each chunk that sampled: more than one where a guess was confirmed; NOT_FINITE: broken row.
    choices: of each beam search whose step this was; empty for a broken row.
    """

    tokens: dict[Chunk, list[tuple[int, float | None]]] = field(default_factory=dict)
    choices: dict[BeamGroup, list[Choice]] = field(default_factory=dict)


class Flight:
    """Filled by the runner. tokens, log_probs: [D] on the device, those of `drawn`; as `sampler.sample`.

    Without tokens it is waited for all the same: adapters that it reads may be let go once it has landed.
    """

    def __init__(
        self,
        step: Step,
        drawn: list[Drawn],
        tokens: Tensor,
        log_probs: Tensor | None,
        choices: dict[BeamGroup, list[Choice]],
    ) -> None:
        self.step = step
        self.tokens = tokens
        self._drawn, self._choices = drawn, choices
        self._places = {id(row[0]): place for place, (_, row) in enumerate(drawn)}
        self._tokens = Arrival(tokens)
        self._log_probs = Arrival(log_probs) if log_probs is not None else None

    def place_of(self, chunk: Chunk) -> int:
        """Which of `tokens` is the next one of the chunk's sequence."""
        return self._places[id(chunk.sequence)]

    @property
    def is_foreseeable(self) -> bool:
        """Whether the next step can be launched before the tokens of this one are seen."""
        going = (chunk.sequence for chunk in self.step.chunks if chunk.samples)
        return all(sequence.is_foreseeable for sequence in going if not sequence.finished)

    def land(self) -> Outcome:
        """Wait for the tokens."""
        outcome = Outcome(choices=self._choices)
        tokens = self._tokens.wait().tolist()
        log_probs = self._log_probs.wait().tolist() if self._log_probs else [None] * len(tokens)
        for (chunk, (sequence, length)), token, log_prob in zip(self._drawn, tokens, log_probs, strict=True):
            found = outcome.tokens.setdefault(chunk, [])
            # Of a guess: go on as long as each token before this one was guessed right.
            known = len(sequence.tokens) - sequence.num_draft - sequence.is_pending
            number = length - known
            if number == 0 or (len(found) == number and found[-1][0] == sequence.tokens[length - 1]):
                asked = sequence.request.params.return_log_probs
                found.append((token, log_prob if asked else None))
        return outcome
