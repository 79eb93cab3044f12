"""Beam search: a group of sequences that share a prompt, and the choice of their next tokens.

Every step extends each of `width` beams by every token and keeps the best. A beam that reaches the end id or
a stop word becomes a result; the search ends when no running beam can still be among the best results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from manylora.engine.sequence import Sequence
from manylora.request import Beam, FinishReason

__all__ = ["BeamGroup", "Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """The next step of one beam: the beam it goes on from, its token, that token's log probability."""

    parent: int
    token: int
    log_prob: float
    score: float  # cumulative log probability


@dataclass(eq=False)
class BeamGroup:
    """leader: computes the prompt and stands for the request; beams: the running ones, the leader among them.

    reserve: KV blocks that belong to the group and are in no beam's table now.
    """

    width: int
    leader: Sequence
    beams: list[Sequence] = field(default_factory=list)
    scores: list[float] = field(default_factory=lambda: [0.0])
    reserve: list[int] = field(default_factory=list)
    results: list[tuple[float, Beam]] = field(default_factory=list)  # score with the length penalty
    forked: bool = False

    def __post_init__(self) -> None:
        self.beams = [self.leader]

    def settle(self, choices: list[Choice]) -> list[Choice]:
        """Turn choices that end into results. Returns those that go on: `width` of them, or none at the end.

        choices: the best 2 * width, the best first, so that `width` go on even if as many end.
        """
        going: list[Choice] = []
        for rank, choice in enumerate(choices):
            if self._ends(choice):
                if rank < self.width:
                    self._add_result(choice)
            elif len(going) < self.width:
                going.append(choice)
        length = self.leader.num_output + 1
        if self.leader.num_prompt + length >= self.leader.max_len:
            for choice in going:
                self._add_result(choice)
            going = []
        if not going or self._is_done(going[0].score, length):
            self._finish(FinishReason.STOP if going else FinishReason.LENGTH)
            return []
        return going

    def move(
        self, choices: list[Choice], fork: Callable[[Sequence, Sequence, list[int]], None]
    ) -> list[Sequence]:
        """Continue each choice in a sequence. Returns the sequences that are new: after the first step.

        fork(source, target, reserve) gives the target the source's KV blocks. The first choice of a parent
        stays in the parent's sequence; others take those of parents without a choice.
        """
        stays: dict[int, int] = {}
        for i, choice in enumerate(choices):
            stays.setdefault(choice.parent, i)
        spare = [beam for at, beam in enumerate(self.beams) if at not in stays]
        added = [self._new_beam() for _ in range(self.width - len(self.beams))]
        spare += added
        moved: list[Sequence] = []
        for i, choice in enumerate(choices):
            source = self.beams[choice.parent]
            target = source if stays[choice.parent] == i else spare.pop()
            if target is not source:
                target.tokens, target.log_probs = list(source.tokens), list(source.log_probs)
                fork(source, target, self.reserve)
            moved.append(target)
        for beam, choice in zip(moved, choices, strict=True):
            beam.tokens.append(choice.token)
            beam.log_probs.append(choice.log_prob)
        self.beams, self.scores = moved, [choice.score for choice in choices]
        self.forked = True
        return added

    def _new_beam(self) -> Sequence:
        one = self.leader
        return Sequence(one.handle, one.request, one.index, one.max_len, one.lease, beams=self)

    def _ends(self, choice: Choice) -> bool:
        params = self.leader.request.params
        if choice.token == params.end_id:
            return True
        output = [*self._output(choice.parent), choice.token]
        return any(tuple(output[-len(word) :]) == word for word in params.stop_words)

    def _output(self, beam: int) -> list[int]:
        sequence = self.beams[beam]
        return sequence.tokens[sequence.num_prompt :]

    def _add_result(self, choice: Choice) -> None:
        params, parent = self.leader.request.params, self.beams[choice.parent]
        tokens, log_probs = self._output(choice.parent), list(parent.log_probs)
        length = len(tokens) + 1
        if choice.token != params.end_id:
            tokens = [*tokens, choice.token]
            log_probs.append(choice.log_prob)
        beam = Beam(tuple(tokens), tuple(log_probs), choice.score)
        self.results.append((choice.score / length**params.length_penalty, beam))
        self.results.sort(key=lambda pair: -pair[0])
        del self.results[self.width :]

    def _is_done(self, best_running: float, length: int) -> bool:
        if len(self.results) < self.width:
            return False
        params = self.leader.request.params
        return params.early_stopping or self.results[-1][0] >= best_running / length**params.length_penalty

    def _finish(self, reason: FinishReason) -> None:
        count = self.leader.request.params.num_return_sequences
        count = self.width if count == 1 else count
        self.leader.results = tuple(beam for _, beam in self.results[:count])
        self.leader.finish_reason = reason


def choose(log_probs: Tensor, group: BeamGroup) -> list[Choice]:
    """The best 2 * width next steps, the best first.

    log_probs [beams, vocab] float32. With a diversity rate g, the n-th best token of a beam is ranked as if
    its log probability were n * g less, n from 0.
    """
    vocab = log_probs.shape[-1]
    count = min(2 * group.width, vocab)
    best, tokens = torch.topk(log_probs, count, dim=-1)
    scores = best + torch.tensor(group.scores, dtype=best.dtype, device=best.device).unsqueeze(1)
    rate = group.leader.request.params.beam_search_diversity_rate
    ranked = scores - rate * torch.arange(count, device=best.device)
    order = torch.topk(ranked.flatten(), min(2 * group.width, ranked.numel())).indices.tolist()
    flat_scores, flat_tokens, flat_best = (x.flatten().tolist() for x in (scores, tokens, best))
    return [Choice(i // count, flat_tokens[i], flat_best[i], flat_scores[i]) for i in order]
