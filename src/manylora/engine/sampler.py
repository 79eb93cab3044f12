"""Logits to tokens. A token depends on its own sequence and seed only, never on the rest of the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from manylora.engine.sequence import Sequence
from manylora.request import SamplingParams

__all__ = ["NOT_FINITE", "Row", "adjust", "sample", "uniform"]

NOT_FINITE = -1  # in place of a token: the row's logits hold a NaN or an infinity
MASK64 = 2**64 - 1

Row = tuple[Sequence, int]
"""Whose next token a row of logits is for, and after how many of its tokens."""


@torch.inference_mode()
def sample(logits: Tensor, rows: Rows[Row]) -> tuple[list[int], list[float | None]]:
    """One token for each row, and its log probability where asked for.

    logits [L, vocab] float32, changed in place; row i is for rows[i].
    """
    if all(_is_plain(sequence) for sequence, _ in rows):  # one wait for the device, not three
        return torch.where(_are_finite(logits), _best(logits), NOT_FINITE).tolist(), [None] * len(rows)
    broken = adjust(logits, rows)
    tokens = _best(logits).tolist()
    drawn = [i for i, (s, _) in enumerate(rows) if not s.request.params.greedy and not broken[i]]
    if drawn:
        _scale(logits, drawn, rows)
        for row, token in zip(drawn, _draw(logits[drawn], [rows[i] for i in drawn]), strict=True):
            tokens[row] = token
    log_probs: list[float | None] = [None] * len(tokens)
    for row, (sequence, _) in enumerate(rows):
        if sequence.request.params.return_log_probs and not broken[row]:
            log_probs[row] = float(torch.log_softmax(logits[row], dim=-1)[tokens[row]])
    return [NOT_FINITE if bad else token for bad, token in zip(broken, tokens, strict=True)], log_probs


def adjust(logits: Tensor, rows: Rows[Row]) -> list[bool]:
    """Apply biases, penalties, bans and guides in place. Returns which rows were not finite before."""
    broken = (~_are_finite(logits)).tolist()
    for row, (sequence, length) in enumerate(rows):
        if broken[row]:
            continue
        if _has_rules(sequence.request.params):
            _apply_rules(logits[row], sequence, length)
        if sequence.matcher is not None:
            _apply_guide(logits[row], sequence)
    return broken


def _are_finite(logits: Tensor) -> Tensor:
    """Of each row. One NaN or infinity makes the sum one; looking at every logit costs thirty times more."""
    return torch.isfinite(logits.sum(dim=-1))


def _best(logits: Tensor) -> Tensor:
    """The first largest logit of each row. NumPy's search is several times faster than torch's on a CPU."""
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


def _is_plain(sequence: Sequence) -> bool:
    """Whether its next token is just the most probable one."""
    params = sequence.request.params
    special = params.return_log_probs or sequence.matcher is not None or _has_rules(params)
    return params.greedy and not special


def _has_rules(params: SamplingParams) -> bool:
    return bool(
        params.bad_words
        or params.min_tokens
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias is not None
    )


def _apply_rules(row: Tensor, sequence: Sequence, length: int) -> None:
    params, vocab = sequence.request.params, row.shape[-1]
    tokens = sequence.tokens[:length]
    output = tokens[sequence.num_prompt :]
    if params.logit_bias is not None:
        bias = torch.from_numpy(np.ascontiguousarray(params.logit_bias[:vocab], np.float32))
        row[: len(bias)] += bias.to(row.device)
    if params.repetition_penalty != 1:
        seen = _index({token for token in tokens if token < vocab}, row)
        scores = row[seen]
        row[seen] = torch.where(
            scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
        )
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output)
        weights = [params.presence_penalty + params.frequency_penalty * n for n in counts.values()]
        row[_index(counts, row)] -= torch.tensor(weights, dtype=row.dtype, device=row.device)
    banned = {word[-1] for word in params.bad_words if _is_next(word, tokens)}
    if params.end_id is not None and len(output) < params.min_tokens:
        banned.add(params.end_id)
    banned = {token for token in banned if 0 <= token < vocab}
    if banned and len(banned) < vocab:
        row[_index(banned, row)] = -torch.inf


def _apply_guide(row: Tensor, sequence: Sequence) -> None:
    """Only tokens the guide allows. Where a ban leaves none of them, the guide wins."""
    vocab = row.shape[-1]
    bits = np.frombuffer(sequence.matcher.compute_bitmask(), np.uint8)
    allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocab].astype(bool))
    if len(allowed) < vocab:
        allowed = torch.nn.functional.pad(allowed, (0, vocab - len(allowed)))
    allowed = allowed.to(row.device)
    if torch.isneginf(row[allowed]).all():
        row[allowed] = 0.0
    row.masked_fill_(~allowed, -torch.inf)


def _is_next(word: tuple[int, ...], tokens: list[int]) -> bool:
    head = word[:-1]
    return not head or tuple(tokens[-len(head) :]) == head


def _index(tokens: Iterable[int], row: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long, device=row.device)


def _scale(logits: Tensor, drawn: list[int], rows: Rows[Row]) -> None:
    temperatures = [rows[row][0].request.params.temperature for row in drawn]
    if any(temperature != 1 for temperature in temperatures):
        divisors = torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)
        logits[drawn] /= divisors.unsqueeze(1)


def _draw(logits: Tensor, rows: Rows[Row]) -> list[int]:
    """Inverse-CDF sampling over the sorted distribution, cut by top-k and min-p, then by top-p.

    logits [R, vocab].
    """
    vocab = logits.shape[-1]
    params = [sequence.request.params for sequence, _ in rows]
    top_k = torch.tensor([[p.top_k or vocab] for p in params], device=logits.device)
    top_p = torch.tensor([[sequence.top_p or 1.0] for sequence, _ in rows], device=logits.device)
    draws = [uniform(s.request.params.seed or 0, s.index, length) for s, length in rows]
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocab, device=logits.device) >= top_k, -torch.inf)
    if any(p.min_p for p in params):
        least = torch.tensor([[p.min_p] for p in params], device=logits.device, dtype=logits.dtype).log()
        ordered = ordered.masked_fill(ordered < ordered[:, :1] + least, -torch.inf)
    probs = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(probs, dim=-1) - probs
    probs = probs.masked_fill(before >= top_p, 0.0)
    cumulative = torch.cumsum(probs.double(), dim=-1)
    target = torch.tensor([draws], dtype=torch.float64, device=logits.device).T * cumulative[:, -1:]
    rank = torch.searchsorted(cumulative, target, right=True)
    # Penalties that overflow leave a row without probabilities; it must not end the step of the others.
    rank = torch.minimum(rank, (probs > 0).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    return torch.gather(order, 1, rank).squeeze(1).tolist()
