"""Beam search: a group of sequences that share a prompt, and the candidates for their next tokens.

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


@dataclass(frozen=True)
class BeamCandidate:
    """A beam extended by one token. parent: index of the beam; log_prob: of the token."""

    parent: int
    token: int
    log_prob: float
    score: float  # cumulative log probability


@dataclass(eq=False)
class BeamGroup:
    """One search.

    leader:  computes the prompt and stands for the request.
    beams:   the running ones, the leader among them.
    scores:  cumulative log probability of each beam.
    reserve: KV blocks of the group that no beam uses now.
    results: (score with the length penalty, result), the best first.
    forked:  whether the beams after the first exist, which is after the first step.
    """

    width: int
    leader: Sequence
    beams: list[Sequence] = field(default_factory=list)
    scores: list[float] = field(default_factory=lambda: [0.0])
    reserve: list[int] = field(default_factory=list)
    results: list[tuple[float, Beam]] = field(default_factory=list)
    forked: bool = False

    def __post_init__(self) -> None:
        self.beams = [self.leader]

    def select(self, candidates: list[BeamCandidate]) -> list[BeamCandidate]:
        """Turn candidates that end into results. Returns the `width` that go on; none when the search ends.

        candidates: the best 2 * width, the best first, so that `width` go on even if as many end.
        """
        chosen: list[BeamCandidate] = []
        for rank, candidate in enumerate(candidates):
            if self._ends(candidate):
                if rank < self.width:
                    self._add_result(candidate)
            elif len(chosen) < self.width:
                chosen.append(candidate)
        length = self.leader.num_output + 1
        if self.leader.num_prompt + length >= self.leader.max_len:
            for candidate in chosen:
                self._add_result(candidate)
            chosen = []
        if not chosen or self._is_done(chosen[0].score, length):
            self._finish(FinishReason.STOP if chosen else FinishReason.LENGTH)
            return []
        return chosen

    def extend(
        self, chosen: list[BeamCandidate], fork: Callable[[Sequence, Sequence, list[int]], None]
    ) -> list[Sequence]:
        """Append each chosen token to a beam. Returns the beams that are new: those of the first step.

        fork(source, target, reserve) gives the target the source's KV blocks. A parent's best candidate stays
        in the parent's sequence; its others take the sequences of parents without a candidate.
        """
        best_of: dict[int, int] = {}  # parent -> index of its best candidate
        for i, candidate in enumerate(chosen):
            best_of.setdefault(candidate.parent, i)
        spare = [beam for index, beam in enumerate(self.beams) if index not in best_of]
        one = self.leader
        added = [
            Sequence(one.handle, one.request, one.index, one.max_len, one.lease, beams=self)
            for _ in range(self.width - len(self.beams))
        ]
        spare += added
        beams: list[Sequence] = []
        for i, candidate in enumerate(chosen):
            source = self.beams[candidate.parent]
            target = source if best_of[candidate.parent] == i else spare.pop()
            if target is not source:
                target.tokens = list(source.tokens)
                target.output.log_probs = list(source.output.log_probs)
                fork(source, target, self.reserve)
            beams.append(target)
        for beam, candidate in zip(beams, chosen, strict=True):
            beam.tokens.append(candidate.token)
            beam.output.log_probs.append(candidate.log_prob)
        self.beams, self.scores = beams, [candidate.score for candidate in chosen]
        self.forked = True
        return added

    def _ends(self, candidate: BeamCandidate) -> bool:
        params = self.leader.request.params
        if candidate.token == params.end_id:
            return True
        output = [*self._output(candidate.parent), candidate.token]
        return any(tuple(output[-len(word) :]) == word for word in params.stop_words)

    def _output(self, beam: int) -> list[int]:
        sequence = self.beams[beam]
        return sequence.tokens[sequence.num_prompt :]

    def _add_result(self, candidate: BeamCandidate) -> None:
        params, parent = self.leader.request.params, self.beams[candidate.parent]
        tokens, log_probs = self._output(candidate.parent), list(parent.output.log_probs)
        length = len(tokens) + 1
        if candidate.token != params.end_id:
            tokens = [*tokens, candidate.token]
            log_probs.append(candidate.log_prob)
        beam = Beam(tuple(tokens), tuple(log_probs), candidate.score)
        self.results.append((candidate.score / length**params.length_penalty, beam))
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
        self.leader.output.beams = tuple(beam for _, beam in self.results[:count])
        self.leader.finish_reason = reason


def best_candidates(log_probs: Tensor, group: BeamGroup) -> list[BeamCandidate]:
    """The best 2 * width candidates, the best first.

    log_probs [beams, vocab] float32. With a diversity rate g, a beam's n-th best token, from 0, is ranked as
    if its log probability were n * g lower.
    """
    vocab = log_probs.shape[-1]
    count = min(2 * group.width, vocab)
    best, tokens = torch.topk(log_probs, count, dim=-1)
    scores = best + torch.tensor(group.scores, dtype=best.dtype, device=best.device).unsqueeze(1)
    rate = group.leader.request.params.beam_search_diversity_rate
    ranked = scores - rate * torch.arange(count, device=best.device)
    order = torch.topk(ranked.flatten(), min(2 * group.width, ranked.numel())).indices.tolist()
    flat_scores, flat_tokens, flat_best = (x.flatten().tolist() for x in (scores, tokens, best))
    return [BeamCandidate(i // count, flat_tokens[i], flat_best[i], flat_scores[i]) for i in order]
