"""Logits to tokens, on the device of the logits, without waiting for it. A token depends only on its own
sequence and seed, never on the rest of the batch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from manylora.engine.sequence import Sequence
from manylora.engine.token_counts import TokenCounts
from manylora.kernels.transfer import upload
from manylora.request import SamplingConfig

NOT_FINITE = -1  # in place of a token: the row's logits hold a NaN or an infinity
MASK64 = 2**64 - 1
LEAST_ORDERED = 64  # logits, of a row with a top-k
GUIDES_S = 0.05  # at most for the masks of all guides of a step

Row = tuple[Sequence, int]
"""The sequence that a row of logits is for, and how many of its tokens come before the next one."""


@torch.inference_mode()
def sample(logits: Tensor, rows: Rows[Row]) -> tuple[Tensor, Tensor | None]:
    """A token for each row [L] int64, NOT_FINITE where the logits are not finite; and log probabilities [L]
    float32 for the rows that ask for them, None where none does.

    logits [L, vocab] float32, changed in place; row i is for rows[i].
    """
    finite = adjust(logits, rows)
    tokens = _best(logits)
    random = [i for i, (sequence, _) in enumerate(rows) if not sequence.request.params.greedy]
    if random:
        picked, where = _select(logits, random)
        tokens = tokens.index_copy(0, where, _draw(picked, [rows[i] for i in random]))
    wanted = [i for i, (sequence, _) in enumerate(rows) if sequence.request.params.return_log_probs]
    log_probs = None
    if wanted:
        picked, where = _select(logits, wanted)
        taken = tokens.index_select(0, where).unsqueeze(1)
        found = torch.log_softmax(picked, dim=-1).gather(1, taken).squeeze(1)
        log_probs = torch.zeros(len(rows), device=logits.device).index_copy_(0, where, found)
    return torch.where(finite, tokens, NOT_FINITE), log_probs


def adjust(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """Apply in place, in this order: biases, temperatures, penalties, bans, guides. Returns which rows can be
    sampled, [L] bool: their logits were finite, and their guide was ready."""
    finite = _are_finite(logits)
    deadline = time.monotonic() + GUIDES_S
    ruled = [
        (row, sequence, length)
        for row, (sequence, length) in enumerate(rows)
        if sequence.request.params.changes_logits or sequence.guide is not None
    ]
    if ruled:
        _scale(logits, {row: sequence.request.params for row, sequence, _ in ruled})
    penalised = [one for one in ruled if one[1].request.params.has_penalties]
    if penalised:
        _penalise(logits, penalised)
    for row, sequence, length in ruled:
        params = sequence.request.params
        if params.bad_words or params.min_tokens:
            _ban(logits[row], sequence, length)
        if sequence.guide is not None:
            allowed = sequence.guide.mask(deadline)
            if allowed is None:
                finite[row] = False
            else:
                _apply_guide(logits[row], allowed)
    return finite


def _select(values: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    """These rows of values, and their indices on its device."""
    where = upload(rows, torch.long, values.device)
    return (values if len(rows) == len(values) else values.index_select(0, where)), where


def _are_finite(logits: Tensor) -> Tensor:
    """For each row. A NaN or infinity makes the sum one; testing every logit costs thirty times more."""
    return torch.isfinite(logits.sum(dim=-1))


def _best(logits: Tensor) -> Tensor:
    """The first largest logit of each row. NumPy's argmax is several times faster than torch's on a CPU."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return torch.argmax(logits, dim=-1)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) from (seed, return sequence, position): splitmix64, the same on every device."""
    state = seed
    for word in (index, position):
        state = (state + 0x9E3779B97F4A7C15 * (word + 1)) & MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
        state ^= state >> 31
    return (state >> 11) / 2**53


def _scale(logits: Tensor, params_of: dict[int, SamplingConfig]) -> None:
    """Add biases, and divide by temperatures, in these rows."""
    divisors = [1.0] * len(logits)
    for row, params in params_of.items():
        divisors[row] = params.divisor
        if params.logit_bias is not None:
            bias = params.logit_bias[: logits.shape[-1]]
            logits[row, : len(bias)] += upload(bias, torch.float32, logits.device)
    if any(divisor != 1 for divisor in divisors):
        logits /= upload(divisors, logits.dtype, logits.device).unsqueeze(1)


def _penalise(logits: Tensor, rows: Rows[tuple[int, Sequence, int]]) -> None:
    """Repetition over all tokens; presence and frequency over those that are counted. In one pass."""
    vocab = logits.shape[-1]
    places, rates, weights = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for row, sequence, length in rows:
        params, seen = sequence.request.params, _counts(sequence, length, vocab)
        places.append(seen.ids + row * vocab)
        rates.append(np.full(len(seen.ids), params.repetition_penalty, np.float32))
        weights.append(params.presence_penalty * (seen.counts > 0) + params.frequency_penalty * seen.counts)
    where = upload(np.concatenate(places), torch.long, logits.device)
    rate = upload(np.concatenate(rates), logits.dtype, logits.device)
    flat = logits.view(-1)
    scores = flat[where]
    scores = torch.where(scores < 0, scores * rate, scores / rate)
    flat[where] = scores - upload(np.concatenate(weights), logits.dtype, logits.device)


def _counts(sequence: Sequence, length: int, vocab: int) -> TokenCounts:
    """Of the first `length` tokens of the sequence."""
    counts = sequence.counts
    if counts is None or counts.length > length:
        ignored = min(sequence.request.params.prompt_ignore_length, sequence.num_prompt)
        counts = sequence.counts = TokenCounts(sequence.tokens[:length], ignored, vocab)
    for token in sequence.tokens[counts.length : length]:
        counts.add(token)
    return counts


def _ban(row: Tensor, sequence: Sequence, length: int) -> None:
    params, vocab = sequence.request.params, row.shape[-1]
    banned = {word[-1] for word in params.bad_words if _is_next(word, sequence.tokens, length)}
    if params.end_id is not None and length - sequence.num_prompt < params.min_tokens:
        banned.add(params.end_id)
    banned = {token for token in banned if 0 <= token < vocab}
    if banned and len(banned) < vocab:
        row.index_fill_(0, _index(banned, row), -torch.inf)


def _apply_guide(row: Tensor, mask: np.ndarray) -> None:
    """Ban tokens that the guide does not allow. Where other bans leave none, the guide has priority."""
    vocab = row.shape[-1]
    mask = mask[:vocab]
    allowed = upload(np.pad(mask, (0, vocab - len(mask))), torch.bool, row.device)
    row.masked_fill_(~allowed, -torch.inf)
    none_left = torch.isneginf(row).all()
    row.masked_fill_(allowed & none_left, 0.0)


def _is_next(word: tuple[int, ...], tokens: list[int], length: int) -> bool:
    """Whether the first `length` tokens end with all of a word but its last token."""
    head = word[:-1]
    return tuple(tokens[max(0, length - len(head)) : length]) == head


def _index(tokens: Iterable[int], row: Tensor) -> Tensor:
    return upload(list(tokens), torch.long, row.device)


def _draw(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """Inverse-CDF sampling, cut by top-k and min-p, then by top-p. logits [R, vocab] -> [R] int64.

    How it is done depends on the row alone: only the largest logits are put in order, where top-k leaves no
    others; all of them for a top-p alone; none without either.
    """
    tokens = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    groups: dict[int, list[int]] = {}
    for i, (sequence, _) in enumerate(rows):
        groups.setdefault(_num_ordered(sequence, logits.shape[-1]), []).append(i)
    for size, members in groups.items():
        picked, where = _select(logits, members)
        chosen = [rows[i] for i in members]
        drawn = _draw_ordered(picked, chosen, size) if size else _draw_uncut(picked, chosen)
        tokens.index_copy_(0, where, drawn)
    return tokens


def _num_ordered(sequence: Sequence, vocab: int) -> int:
    """How many of the largest logits must be in order: a few sizes, so that rows go together. Twice top-k, as
    of equal logits the first ones count."""
    top_k = sequence.request.params.top_k
    if top_k:
        return min(vocab, max(LEAST_ORDERED, 1 << (2 * top_k - 1).bit_length()))
    return vocab if (sequence.top_p or 1.0) < 1 else 0


def _draw_ordered(logits: Tensor, rows: Rows[Row], size: int) -> Tensor:
    """From the `size` largest logits in descending order; equal ones by their ids."""
    device = logits.device
    params = [sequence.request.params for sequence, _ in rows]
    ordered, order = _largest(logits, size)
    top_k = upload([[p.top_k or size] for p in params], torch.long, device)
    top_p = upload([[sequence.top_p or 1.0] for sequence, _ in rows], torch.float32, device)
    ordered = ordered.masked_fill(torch.arange(size, device=device) >= top_k, -torch.inf)
    ordered = _cut_by_min_p(ordered, ordered[:, :1], params)
    probs = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(probs, dim=-1) - probs
    probs = probs.masked_fill(before >= top_p, 0.0)
    rank = _place(probs, rows)
    # Penalties that overflow leave a row without probabilities; the other rows must not fail with it.
    rank = torch.minimum(rank, (probs > 0).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    return torch.gather(order, 1, rank).squeeze(1)


def _draw_uncut(logits: Tensor, rows: Rows[Row]) -> Tensor:
    """From all logits, in the order of their ids."""
    largest = logits.amax(dim=-1, keepdim=True)
    cut = _cut_by_min_p(logits, largest, [sequence.request.params for sequence, _ in rows])
    rank = _place(torch.softmax(cut, dim=-1), rows)
    return rank.clamp_(max=logits.shape[-1] - 1).squeeze(1)


def _largest(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row in descending order, equal ones by their ids; and the ids."""
    if size == logits.shape[-1]:
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    ids = torch.topk(logits, size, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)


def _cut_by_min_p(logits: Tensor, largest: Tensor, params: Rows[SamplingConfig]) -> Tensor:
    if not any(p.min_p for p in params):
        return logits
    least = upload([[p.min_p] for p in params], logits.dtype, logits.device).log()
    return logits.masked_fill(logits < largest + least, -torch.inf)


def _place(probs: Tensor, rows: Rows[Row]) -> Tensor:
    """[R, 1] int64: where in the cumulated probabilities [R, N] each row's number falls."""
    draws = [[uniform(s.request.params.seed or 0, s.index, length)] for s, length in rows]
    cumulated = torch.cumsum(probs.double(), dim=-1)
    total = cumulated[:, -1:]
    target = torch.minimum(
        upload(draws, torch.float64, probs.device) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cumulated, target, right=True)
