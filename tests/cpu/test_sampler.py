"""Protects sampling: each rule against its definition, reproducible by seed, blind to its company."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from penalties import Formula, tensorrt_llm, vllm

from manylora.engine.sampler import adjust, sample, uniform
from manylora.engine.sequence import Sequence
from manylora.kernels.device import open_device
from manylora.kernels.reference import best_tokens
from manylora.kernels.spec import NOT_FINITE
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


@pytest.mark.parametrize("width", [1, 5, 8, 16, 33, 1000, 40_000])
def test_the_best_token_of_each_row_is_the_same_by_all_operations(width: int) -> None:
    """The first of equal ones, at either end and between; none where a logit is not finite."""
    rows = torch.randn(9, width, generator=torch.Generator().manual_seed(width)).round(decimals=1)
    rows[1], rows[2] = -3.5, -torch.arange(width)
    rows[3], rows[4] = torch.arange(width), -0.0
    rows[4, width // 2 :] = 0.0
    rows[5, width - 1], rows[6, 0], rows[7, width // 2] = torch.nan, torch.inf, -torch.inf
    expected = [*(int(row.argmax()) for row in rows[:5].numpy()), *[NOT_FINITE] * 3]
    for best in (open_device("cpu").ops.best, best_tokens):
        found = best(rows)
        assert found.tolist()[:8] == expected
        assert int(found[8]) == int(rows[8].numpy().argmax())


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


def test_a_draw_depends_on_its_own_seed_only() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 50, generator=generator)
    made = [sequence(SamplingConfig(top_p=0.9, seed=s, temperature=1.3)) for s in range(8)]
    together, _ = sample(rows.clone(), [(s, len(s.tokens)) for s in made])
    alone = [sample(rows[i : i + 1].clone(), [(made[i], len(made[i].tokens))])[0].item() for i in range(8)]
    assert together.tolist() == alone
    words = [(i, p) for i in range(3) for p in range(50)]
    numbers = uniform([1] * 150, [i for i, _ in words], [p for _, p in words]).ravel().tolist()
    assert len(set(numbers)) == 150 and min(numbers) >= 0 and max(numbers) < 1
    assert uniform([2**64 - 1], [3], [70000]).item() == 0.645034529875876


def test_log_probs_and_broken_rows() -> None:
    asked = SamplingConfig(return_log_probs=True)
    token, log_prob = one([1.0, 2.0], sequence(asked))
    assert token == 1
    assert log_prob == pytest.approx(torch.log_softmax(torch.tensor([1.0, 2.0]), 0)[1].item())
    rows = torch.tensor([[float("nan"), 1.0], [0.0, 1.0]])
    tokens, _ = sample(rows, [(sequence(SamplingConfig(top_p=0.5)), 1), (sequence(SamplingConfig()), 1)])
    assert tokens.tolist() == [NOT_FINITE, 1]
    broken = torch.tensor([[0.0, -torch.inf], [torch.inf, -torch.inf], [0.0, torch.inf], [3.0, 2.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens, _ = sample(broken, [(sequence(SamplingConfig()), 1)] * 4)
    assert tokens.tolist() == [NOT_FINITE, NOT_FINITE, NOT_FINITE, 0]


def test_a_penalty_that_overflows_is_its_own_request_s_fault_only() -> None:
    """A row of infinities has no distribution; the rows beside it have one."""
    wild = sequence(SamplingConfig(presence_penalty=-3.4e38, temperature=0.5, top_p=0.9), (0,), (1,))
    calm = sequence(SamplingConfig(top_p=0.5), (0,))
    tokens, _ = sample(torch.tensor([[0.0, 3e38, 1.0], [0.0, 9.0, 1.0]]), [(wild, 2), (calm, 1)])
    assert 0 <= tokens[0] < 3 and tokens[1] == 1


def test_rows_of_every_cut_in_one_batch_follow_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none puts a whole vocabulary in order."""
    generator = torch.Generator().manual_seed(3)
    cuts = [{"top_k": 5}, {"top_k": 40, "top_p": 0.7}, {"top_p": 0.8}, {"top_k": 200, "min_p": 0.02}]
    cuts += [{"top_p": 0.9, "typical_p": 0.4}, {"top_k": 40, "typical_p": 0.6}]
    made = [sequence(SamplingConfig(seed=i, **cuts[i % 6])) for i in range(24)]  # type: ignore[arg-type]
    logits = torch.randn(24, 1000, generator=generator).mul(3).round()  # with many that are equal
    sorted_rows: list[int] = []
    sort = torch.sort

    def watched(values: torch.Tensor, *arguments: object, **options: object) -> object:
        if values.shape[-1] == 1000:
            sorted_rows.append(len(values))
        return sort(values, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "sort", watched)
    tokens, _ = sample(logits.clone(), [(s, 1) for s in made])
    assert not sorted_rows
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
    if params.typical_p < 1:
        probs /= probs.sum()
        information = -np.log(probs, out=np.full_like(probs, -np.inf), where=probs > 0)
        expected = (probs[probs > 0] * information[probs > 0]).sum()
        nearest = np.argsort(np.abs(information - expected), kind="stable")
        probs[nearest[np.cumsum(probs[nearest]) - probs[nearest] >= params.typical_p]] = 0
    if not params.top_k:  # drawn in the order of ids
        back = np.argsort(order)
        order, probs = order[back], probs[back]
    cumulated = np.cumsum(probs)
    target = uniform([params.seed or 0], [0], [1]).item() * cumulated[-1]
    return int(order[np.searchsorted(cumulated, target, side="right")])
