"""Protects sampling: each rule against its definition, reproducible by seed, blind to its company."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from penalties import Formula, tensorrt_llm, vllm

from manylora.engine import sampler
from manylora.engine.sampler import NOT_FINITE, adjust, sample, uniform
from manylora.engine.sequence import Sequence
from manylora.engine.token_counts import TokenCounts
from manylora.request import Request, SamplingConfig


def sequence(
    params: SamplingConfig, tokens: tuple[int, ...] = (0,), output: tuple[int, ...] = ()
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
        SamplingConfig(),
        SamplingConfig(top_k=1, temperature=3.0),
        SamplingConfig(temperature=0.0, top_p=0.9),
        SamplingConfig(top_k=0, top_p=0.0),
    ],
)
def test_greedy_takes_the_most_probable(params: SamplingConfig) -> None:
    assert params.greedy
    assert one([0.1, 2.0, 1.0], sequence(params))[0] == 1


def test_penalties() -> None:
    penalised = SamplingConfig(repetition_penalty=2.0)
    assert one([0.0, 2.0, 1.5], sequence(penalised, (1,)))[0] == 2
    assert one([-1.0, -2.0, -1.5], sequence(penalised, (0,)))[0] == 2
    frequent = SamplingConfig(frequency_penalty=0.5)
    assert one([1.0, 1.9, 0.0], sequence(frequent, (2,), (1,)))[0] == 1
    assert one([1.0, 1.9, 0.0], sequence(frequent, (2,), (1, 1)))[0] == 0
    assert one([1.0, 1.9], sequence(SamplingConfig(presence_penalty=1.0), (1,)))[0] == 0, "the prompt counts"
    ignoring = SamplingConfig(presence_penalty=1.0, prompt_ignore_length=1)
    assert one([1.0, 1.9], sequence(ignoring, (1,)))[0] == 1
    assert one([1.0, 1.9], sequence(ignoring, (0,), (1,)))[0] == 0, "the output counts always"


VOCAB = 40
CASES = [
    {"presence_penalty": 1.3},
    {"presence_penalty": 1.3, "temperature": 0.5},
    {"presence_penalty": -0.7, "frequency_penalty": 0.4, "temperature": 2.5, "prompt_ignore_length": 3},
    {"frequency_penalty": 0.9, "temperature": 0.8, "prompt_ignore_length": 99},
    {"repetition_penalty": 1.7, "temperature": 1.6, "prompt_ignore_length": 99},
    {"repetition_penalty": 0.6, "presence_penalty": 0.5, "frequency_penalty": -0.3, "temperature": 0.0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "temperature": 0.7},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("meaning", [tensorrt_llm, vllm])
def test_penalties_follow_their_formulas_step_by_step(case: dict, drawn: bool, meaning: Formula) -> None:
    """One sequence over many steps, beside one without penalties: only its temperature changes its logits."""
    choice = np.random.default_rng(5)
    bias = choice.normal(0, 1, VOCAB).astype(np.float32) if drawn else None
    params = SamplingConfig(logit_bias=bias, top_p=0.9 if drawn else None, **case)
    if meaning is vllm:
        params = params.with_output_penalties()
    prompt = choice.integers(0, VOCAB // 2, 9).tolist()
    made = sequence(params, (*prompt, VOCAB + 3))  # the last one is a row of a prompt embedding
    mate = sequence(SamplingConfig(top_p=0.9, temperature=0.5), (1, 2))
    for step in range(20):
        rows = torch.from_numpy(choice.normal(0, 3, (2, VOCAB)).astype(np.float32))
        logits = rows[0].numpy() if bias is None else rows[0].numpy() + bias
        expected = meaning(logits, prompt, made.tokens[len(prompt) + 1 :], **case)
        expected_mate = rows[1] / 0.5
        assert adjust(rows, [(made, len(made.tokens)), (mate, 2)]).all()
        np.testing.assert_allclose(rows[0].numpy(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(rows[1], expected_mate)
        made.tokens.append(int(choice.integers(0, VOCAB // (1 + step % 3))))


def test_counting_a_token_more_does_not_count_the_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sequence(SamplingConfig(frequency_penalty=0.1), tuple(range(30)))
    added: list[int] = []
    add = TokenCounts.add
    monkeypatch.setattr(TokenCounts, "add", lambda self, token: (added.append(token), add(self, token)))
    for token in (31, 3, 31, 32):
        one([0.0] * VOCAB, made)
        made.tokens.append(token)
    one([0.0] * VOCAB, made)
    assert added == [31, 3, 31, 32]
    assert made.counts is not None
    found = dict(zip(made.counts.ids.tolist(), made.counts.counts.tolist(), strict=True))
    assert found == dict(Counter(made.tokens))


def test_bad_words_and_min_tokens() -> None:
    bad = SamplingConfig(bad_words=((1,), (5, 2)))
    assert one([0.0, 3.0, 2.0, 1.0], sequence(bad, (5,)))[0] == 3
    assert one([0.0, 3.0, 2.0, 1.0], sequence(bad, (4,)))[0] == 2
    late = SamplingConfig(end_id=1, min_tokens=2)
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
        drawn = Counter(one(logits, sequence(SamplingConfig(seed=s, **params)))[0] for s in range(600))
        assert set(drawn) == allowed, params
    assert abs(drawn[0] / 600 - 0.5) < 0.08
    assert abs(drawn[1] / 600 - 0.3) < 0.08


def test_a_draw_depends_on_its_own_seed_only() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 50, generator=generator)
    made = [sequence(SamplingConfig(top_p=0.9, seed=s, temperature=1.3)) for s in range(8)]
    together, _ = sample(rows.clone(), [(s, len(s.tokens)) for s in made])
    alone = [sample(rows[i : i + 1].clone(), [(made[i], len(made[i].tokens))])[0].item() for i in range(8)]
    assert together.tolist() == alone
    assert len({uniform(1, i, p) for i in range(3) for p in range(50)}) == 150


def test_log_probs_and_broken_rows() -> None:
    asked = SamplingConfig(return_log_probs=True)
    token, log_prob = one([1.0, 2.0], sequence(asked))
    assert token == 1
    assert log_prob == pytest.approx(torch.log_softmax(torch.tensor([1.0, 2.0]), 0)[1].item())
    rows = torch.tensor([[float("nan"), 1.0], [0.0, 1.0]])
    tokens, _ = sample(rows, [(sequence(SamplingConfig(top_p=0.5)), 1), (sequence(SamplingConfig()), 1)])
    assert tokens.tolist() == [NOT_FINITE, 1]


def test_a_penalty_that_overflows_is_its_own_request_s_fault_only() -> None:
    """A row of infinities has no distribution; the rows beside it have one."""
    wild = sequence(SamplingConfig(presence_penalty=-3.4e38, temperature=0.5, top_p=0.9), (0,), (1,))
    calm = sequence(SamplingConfig(top_p=0.5), (0,))
    tokens, _ = sample(torch.tensor([[0.0, 3e38, 1.0], [0.0, 9.0, 1.0]]), [(wild, 2), (calm, 1)])
    assert 0 <= tokens[0] < 3 and tokens[1] == 1


def test_rows_of_every_cut_in_one_batch_follow_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only a top-p alone puts a whole vocabulary in order."""
    generator = torch.Generator().manual_seed(3)
    cuts = [{"top_k": 5}, {"top_k": 40, "top_p": 0.7}, {"top_p": 0.8}, {"top_k": 200, "min_p": 0.02}]
    made = [sequence(SamplingConfig(seed=i, **cuts[i % 4])) for i in range(24)]  # type: ignore[arg-type]
    logits = torch.randn(24, 1000, generator=generator).mul(3).round()  # with many that are equal
    sorted_rows: list[int] = []
    sort = torch.sort

    def watched(values: torch.Tensor, *arguments: object, **options: object) -> object:
        if values.shape[-1] == 1000:
            sorted_rows.append(len(values))
        return sort(values, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "sort", watched)
    tokens, _ = sample(logits.clone(), [(s, 1) for s in made])
    assert sorted_rows == [6]
    assert tokens.tolist() == [_by_definition(logits[i].double().numpy(), s) for i, s in enumerate(made)]
    sorted_rows.clear()
    free = [sequence(SamplingConfig(seed=i, top_p=1.0)) for i in range(400)]
    tokens, _ = sample(torch.tensor([-90.0, 0.0]).repeat(400, 500), [(s, 1) for s in free])
    assert not sorted_rows and all(token % 2 for token in tokens.tolist())
    assert len(set(tokens.tolist())) > 200


def _by_definition(logits: np.ndarray, made: Sequence) -> int:
    params = made.request.params
    order = np.argsort(-logits, kind="stable")[: params.top_k or None]
    weights = np.exp(logits[order] - logits[order[0]])
    weights[weights < params.min_p] = 0
    probs = weights / weights.sum()
    probs[np.cumsum(probs) - probs >= (params.top_p or 1)] = 0
    cumulated = np.cumsum(probs)
    target = uniform(params.seed or 0, 0, 1) * cumulated[-1]
    return int(order[np.searchsorted(cumulated, target, side="right")])


def test_penalties_of_many_rows_are_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some operations for each row took longer than a step; and a row is what it is alone."""
    cases = [{"repetition_penalty": 1.3}, {"presence_penalty": 0.4, "frequency_penalty": 0.2}, {}]
    made = [sequence(SamplingConfig(**cases[i % 3]), (i, 7, 7), (i + 1,)) for i in range(9)]  # type: ignore[arg-type]
    logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(1))
    alone = logits.clone()
    for i, one_sequence in enumerate(made):
        adjust(alone[i : i + 1], [(one_sequence, 4)])
    uploads: list[int] = []
    upload = sampler.upload
    monkeypatch.setattr(sampler, "upload", lambda *args: (uploads.append(1), upload(*args))[1])
    together = logits.clone()
    adjust(together, [(one_sequence, 4) for one_sequence in made])
    assert torch.equal(together, alone) and not torch.equal(together, logits)
    assert len(uploads) == 3
