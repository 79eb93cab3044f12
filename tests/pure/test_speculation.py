"""Protects drafts by n-grams: what is found, in how much memory, and when drafting stops because it costs."""

from __future__ import annotations

import random

import pytest

from manylora.config.engine import EngineConfig
from manylora.doors.python.llm_args import NGramDecodingConfig
from manylora.doors.python.options import llm_arguments
from manylora.engine.speculation import (
    FEW,
    MOST_PLACES,
    Drafter,
    NgramIndex,
    Speculation,
    StepTimes,
)
from manylora.errors import ConfigError
from manylora.request import Guide, Request, SamplingConfig


def searched(tokens: list[int], count: int, smallest: int, largest: int, oldest: bool) -> list[int]:
    """What `NgramIndex.find` is to give, by looking everywhere."""
    for size in range(min(largest, len(tokens) - 1), smallest - 1, -1):
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
        if ends:
            start, known = ends[0] if oldest else ends[-1], list(tokens)
            for i in range(count):
                known.append(known[start + i])
            return known[len(tokens) :]
    return []


@pytest.mark.parametrize("oldest", [True, False])
@pytest.mark.parametrize(("smallest", "largest"), [(1, 1), (1, 3), (2, 4), (5, 5)])
@pytest.mark.parametrize("jumps", [1, 7, 3 * FEW])
def test_the_longest_ngram_is_found_where_it_stood(
    monkeypatch: pytest.MonkeyPatch, oldest: bool, smallest: int, largest: int, jumps: int
) -> None:
    # No two of these share a place.
    monkeypatch.setattr("manylora.engine.speculation.FEWEST_PLACES", MOST_PLACES)
    picks = random.Random(smallest + 10 * largest)
    text = [picks.randrange(4) for _ in range(60)] + [picks.randrange(2**31) for _ in range(30)]
    text += [*text[10:80], 3, 4, 3, 4, 3, 4, 3]
    index = NgramIndex(smallest, largest, oldest)
    for length in range(1, len(text) + 1, jumps):
        tokens = text[:length]
        assert index.find(tokens, 6) == searched(tokens, 6, smallest, largest, oldest), tokens


def test_a_long_sequence_takes_bounded_memory() -> None:
    picks = random.Random(1)
    tokens = [picks.randrange(100_000) for _ in range(3 * MOST_PLACES)]
    index = NgramIndex(2, 4, oldest=False)
    index.find(tokens, 4)
    assert index._tables.nbytes == 3 * 4 * MOST_PLACES
    assert index.find([*tokens, *tokens[-50:-40]], 3) == tokens[-40:-37], "the newest are still found"


def simulated(fixed: float, by_row: float, count: int, share: float, most: int) -> float:
    """Seconds of `count` requests of 256 tokens on a machine where a step takes so long, and a row of it.
    share: of drafts that are right. most: tokens of a draft; 0: none."""
    picks, times, clock = random.Random(count), StepTimes(), 0.0
    running = [(Drafter(NgramIndex(1, 1, True), most), [7] * 20) for _ in range(count)]
    while running:
        price = times.price(len(running))
        drafts = [drafter.propose(tokens, most, price) for drafter, tokens in running]
        took = fixed + by_row * (len(running) + sum(map(len, drafts)))
        took *= picks.uniform(0.95, 1.05)
        accepted = 0
        for (drafter, tokens), draft in zip(running, drafts, strict=True):
            right = next((n for n in range(len(draft)) if picks.random() > share), len(draft))
            if draft:
                drafter.record_result(len(draft), right, len(tokens))
            accepted += right
            tokens += [7] * (1 + right)
        times.add(len(running), sum(map(len, drafts)), took, accepted)
        clock += took
        running = [one for one in running if len(one[1]) < 276]
    return clock


@pytest.mark.parametrize("count", [1, 4, 16, 40])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 1.0])
def test_drafts_never_cost_much_and_help_where_rows_are_cheap(count: int, share: float) -> None:
    """Rows cost from nearly nothing to all that a step does."""
    for fixed, by_row in ((0.010, 0.0001), (0.010, 0.002), (0.001, 0.002), (0.0, 0.003)):
        plain = simulated(fixed, by_row, count, share, 0)
        drafted = simulated(fixed, by_row, count, share, 5)
        assert drafted < 1.06 * plain, (fixed, by_row)
        if by_row * count < 0.1 * fixed and share >= 0.95:
            assert drafted < 0.5 * plain, (fixed, by_row)


def speculation(**settings: int) -> Speculation:
    from pathlib import Path

    return Speculation(EngineConfig(Path("model"), **settings))  # type: ignore[arg-type]


def test_requests_whose_drafts_would_not_be_exact_have_none() -> None:
    on = speculation(max_draft_len=4)
    assert on.drafter(Request((1, 2), SamplingConfig(temperature=0.5, top_p=0.9))) is not None
    for params in (
        SamplingConfig(beam_width=2),
        SamplingConfig(guide=Guide("json")),
        SamplingConfig(top_p=0.9, top_p_decay=0.9),
    ):
        assert on.drafter(Request((1, 2), params)) is None
    assert on.drafter(Request((1, 2), draft=(3,))) is None
    assert speculation().drafter(Request((1, 2))) is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "max_draft_len must be given"),
        ({"max_draft_len": 4, "is_public_pool": True}, "is_public_pool must be False"),
        ({"max_draft_len": 4, "is_keep_all": False}, "is_keep_all must be True"),
        ({"max_draft_len": 4, "decoding_type": "Eagle"}, "decoding_type must be NGram"),
        ({"method": "eagle", "num_speculative_tokens": 4}, "method must be ngram, got 'eagle'"),
        ({"max_draft_len": 4, "max_ngram": 3}, "unknown field of speculative_config: max_ngram"),
    ],
)
def test_what_no_drafter_does_is_refused_by_name(given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        llm_arguments({"speculative_config": given})


def test_names_of_vllm_mean_the_same() -> None:
    theirs = {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 2,
        "disable_by_batch_size": 8,
    }  # fmt: skip
    made = llm_arguments({"speculative_config": theirs})["speculative_config"]
    assert made == NGramDecodingConfig(5, 3, 2, max_concurrency=8)
