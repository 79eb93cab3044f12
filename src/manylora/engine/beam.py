"""Beam search: extends a group of sequences that share a prompt by candidates for their next tokens.

Every step extends each of `width` beams by every token and keeps the best. A beam that reaches the end id or
a stop word becomes a result. The search ends when no running beam can still be among the best results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manylora.engine.kv_cache import KvCache
from manylora.engine.sequence import BeamGroup, Sequence
from manylora.request import Beam, FinishReason


@dataclass(frozen=True)
class BeamCandidate:
    """A beam extended by one token. parent: index of the beam; log_prob: of the token."""

    parent: int
    token: int
    log_prob: float
    score: float  # cumulative log probability


def select_beams(group: BeamGroup, candidates: list[BeamCandidate]) -> list[BeamCandidate]:
    """The `width` of these, best first, that continue; none if the search ends. Others become results."""
    chosen: list[BeamCandidate] = []
    for rank, candidate in enumerate(candidates):
        if _ends(group, candidate):
            if rank < group.width:
                _add_result(group, candidate)
        elif len(chosen) < group.width:
            chosen.append(candidate)
    leader, params = group.leader, group.leader.request.params
    length = leader.num_output + 1
    if leader.num_prompt + length >= leader.max_len:
        for candidate in chosen:
            _add_result(group, candidate)
        chosen = []
    if chosen:
        best = chosen[0].score / length**params.length_penalty
        full = len(group.results) >= group.width
        if not full or not (params.early_stopping or group.results[-1][0] >= best):
            return chosen
    count = group.width if params.num_return_sequences == 1 else params.num_return_sequences
    leader.output.beams = tuple(beam for _, beam in group.results[:count])
    leader.finish_reason = FinishReason.STOP if chosen else FinishReason.LENGTH
    return []


def extend_beams(group: BeamGroup, chosen: list[BeamCandidate], kv: KvCache) -> list[Sequence]:
    """Append each chosen token to a beam. Returns the new beams, which are those of the first step.

    A parent's best candidate stays in the parent's sequence. Its other candidates use the sequences of
    parents without a candidate, which then share the parent's KV blocks.
    """
    best_of: dict[int, int] = {}  # parent -> index of its best candidate
    for i, candidate in enumerate(chosen):
        best_of.setdefault(candidate.parent, i)
    one = group.leader
    added = [
        Sequence(
            one.handle, one.request, one.index, one.max_len, one.lease, group, rope_length=one.rope_length
        )
        for _ in range(group.width - len(group.beams))
    ]
    spare = [beam for index, beam in enumerate(group.beams) if index not in best_of] + added
    beams: list[Sequence] = []
    for i, candidate in enumerate(chosen):
        source = group.beams[candidate.parent]
        target = source if best_of[candidate.parent] == i else spare.pop()
        if target is not source:
            target.tokens = list(source.tokens)
            target.counts = source.counts and source.counts.copy()
            target.output.log_probs = list(source.output.log_probs)
            kv.fork(source, target, group.reserve)
        beams.append(target)
    for beam, candidate in zip(beams, chosen, strict=True):
        beam.tokens.append(candidate.token)
        beam.output.log_probs.append(candidate.log_prob)
    group.beams, group.scores = beams, [candidate.score for candidate in chosen]
    group.forked = True
    return added


def _ends(group: BeamGroup, candidate: BeamCandidate) -> bool:
    params, parent = group.leader.request.params, group.beams[candidate.parent]
    if candidate.token == params.end_id:
        return True
    output = [*parent.tokens[parent.num_prompt :], candidate.token]
    return any(tuple(output[-len(word) :]) == word for word in params.stop_words)


def _add_result(group: BeamGroup, candidate: BeamCandidate) -> None:
    params, parent = group.leader.request.params, group.beams[candidate.parent]
    tokens, log_probs = parent.tokens[parent.num_prompt :], list(parent.output.log_probs)
    length = len(tokens) + 1
    if candidate.token != params.end_id:
        tokens = [*tokens, candidate.token]
        log_probs.append(candidate.log_prob)
    beam = Beam(tuple(tokens), tuple(log_probs), candidate.score)
    group.results.append((candidate.score / length**params.length_penalty, beam))
    group.results.sort(key=lambda pair: -pair[0])
    del group.results[group.width :]


def best_candidates(log_probs: Tensor, group: BeamGroup) -> list[BeamCandidate]:
    """The best 2 * width candidates, best first.

    log_probs [beams, vocab] float32. With a diversity rate g, a beam's n-th best token, counted from 0, is
    ranked as if its log probability were n * g lower.
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
