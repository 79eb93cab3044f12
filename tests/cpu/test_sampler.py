"""Protects sampling: each rule against its definition, reproducible by seed, blind to its company."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from manylora.engine.sampler import NOT_FINITE, sample, uniform
from manylora.engine.sequence import Sequence
from manylora.request import Request, SamplingParams


def sequence(
    params: SamplingParams, tokens: tuple[int, ...] = (0,), output: tuple[int, ...] = ()
) -> Sequence:
    made = Sequence(0, Request(tokens, params), 0, 10_000)
    made.tokens += output
    return made


def one(logits: list[float], made: Sequence) -> tuple[int, float | None]:
    tokens, log_probs = sample(torch.tensor([logits]), [(made, len(made.tokens))])
    return int(tokens[0]), None if log_probs is None else float(log_probs[0])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=1, temperature=3.0),
        SamplingParams(temperature=0.0, top_p=0.9),
        SamplingParams(top_k=0, top_p=0.0),
    ],
)
def test_greedy_takes_the_most_probable(params: SamplingParams) -> None:
    assert params.greedy
    assert one([0.1, 2.0, 1.0], sequence(params))[0] == 1


def test_penalties() -> None:
    penalised = SamplingParams(repetition_penalty=2.0)
    assert one([0.0, 2.0, 1.5], sequence(penalised, (1,)))[0] == 2
    assert one([-1.0, -2.0, -1.5], sequence(penalised, (0,)))[0] == 2
    frequent = SamplingParams(frequency_penalty=0.5)
    assert one([1.0, 1.9], sequence(frequent, (0,), (1,)))[0] == 1
    assert one([1.0, 1.9], sequence(frequent, (0,), (1, 1)))[0] == 0
    assert one([1.0, 1.9], sequence(SamplingParams(presence_penalty=1.0), (1,)))[0] == 1, (
        "prompt is not output"
    )
    assert one([1.0, 1.9], sequence(SamplingParams(presence_penalty=1.0), (0,), (1,)))[0] == 0


def test_bad_words_and_min_tokens() -> None:
    bad = SamplingParams(bad_words=((1,), (5, 2)))
    assert one([0.0, 3.0, 2.0, 1.0], sequence(bad, (5,)))[0] == 3
    assert one([0.0, 3.0, 2.0, 1.0], sequence(bad, (4,)))[0] == 2
    late = SamplingParams(end_id=1, min_tokens=2)
    assert one([0.0, 3.0], sequence(late, (0,), (0,)))[0] == 0
    assert one([0.0, 3.0], sequence(late, (0,), (0, 0)))[0] == 1


def test_the_distribution_is_cut_and_followed() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).tolist()
    for params, allowed in [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 1.0, "min_p": 0.2}, {0, 1, 2}),
        ({"top_p": 1.0, "min_p": 1.0}, {0}),
        ({"top_k": 4}, {0, 1, 2, 3}),
    ]:
        drawn = Counter(one(logits, sequence(SamplingParams(seed=s, **params)))[0] for s in range(600))
        assert set(drawn) == allowed, params
    assert abs(drawn[0] / 600 - 0.5) < 0.08
    assert abs(drawn[1] / 600 - 0.3) < 0.08


def test_a_draw_depends_on_its_own_seed_only() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 50, generator=generator)
    made = [sequence(SamplingParams(top_p=0.9, seed=s, temperature=1.3)) for s in range(8)]
    together, _ = sample(rows.clone(), [(s, len(s.tokens)) for s in made])
    alone = [sample(rows[i : i + 1].clone(), [(made[i], len(made[i].tokens))])[0].item() for i in range(8)]
    assert together.tolist() == alone
    assert len({uniform(1, i, p) for i in range(3) for p in range(50)}) == 150


def test_log_probs_and_broken_rows() -> None:
    asked = SamplingParams(return_log_probs=True)
    token, log_prob = one([1.0, 2.0], sequence(asked))
    assert token == 1
    assert log_prob == pytest.approx(torch.log_softmax(torch.tensor([1.0, 2.0]), 0)[1].item())
    rows = torch.tensor([[float("nan"), 1.0], [0.0, 1.0]])
    tokens, _ = sample(rows, [(sequence(SamplingParams(top_p=0.5)), 1), (sequence(SamplingParams()), 1)])
    assert tokens.tolist() == [NOT_FINITE, 1]


def test_a_penalty_that_overflows_is_its_own_request_s_fault_only() -> None:
    """A row of infinities has no distribution; the rows beside it have one."""
    wild = sequence(SamplingParams(presence_penalty=-3.4e38, temperature=0.5, top_p=0.9), (0,), (1,))
    calm = sequence(SamplingParams(top_p=0.5), (0,))
    tokens, _ = sample(torch.tensor([[0.0, 3e38, 1.0], [0.0, 9.0, 1.0]]), [(wild, 2), (calm, 1)])
    assert 0 <= tokens[0] < 3 and tokens[1] == 1
