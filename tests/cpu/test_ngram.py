"""Protects drafts by n-grams: every token and log probability is the one without them, whatever is in the
batch, whatever ends in the middle of a draft, and nothing of another request is drafted."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import read, run
from serving import DEMO, Running
from tiny_models import make_adapter, make_model

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.doors.python.llm_args import NGramDecodingConfig
from manylora.engine.engine import Engine
from manylora.engine.speculation import NgramIndex, StepTimes
from manylora.errors import ConfigError
from manylora.request import Event, LoraInput, Request, SamplingConfig

SEEDS = range(2)
WORDS = range(40, 45)  # an answer of these alone repeats itself
BIAS = np.full(272, -50, np.float32)
BIAS[list(WORDS)] = 0
KINDS: list[dict[str, Any]] = [
    {"rank": 4}, {"rank": 8, "use_dora": True}, {"rank": 2, "modules": ("down_proj", "gate_proj")},
    {"rank": 16, "modules": ("q_proj", "o_proj", "up_proj")},
]  # fmt: skip
WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"temperature": 0.9, "top_k": 3, "min_p": 0.05, "seed": 4, "num_return_sequences": 2},
    {"repetition_penalty": 1.05, "presence_penalty": 0.2, "frequency_penalty": 0.02},
    {"top_p": 0.95, "top_p_decay": 0.9, "temperature": 0.9, "seed": 1},
    {"end_id": 42, "min_tokens": 20},
    {"stop_words": ((41, 40), (43, 44, 43))},
    {"bad_words": ((40, 41), (42,))},
    {"return_generation_logits": True},
    {"beam_width": 2},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("ngram") / "model", seed=2)


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[LoraInput | None]:
    folders = [make_adapter(model.parent / str(i), model, seed=i, **kind) for i, kind in enumerate(KINDS)]
    return [None, *(read(folder, model, i + 1) for i, folder in enumerate(folders))]


@pytest.fixture
def no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether to draft is not to depend on this machine's times."""
    monkeypatch.setattr(StepTimes, "price", lambda *_: 0.0)


def open_engine(model: Path, **options: Any) -> Engine:
    lora = LoraCacheConfig(gpu_memory_bytes=2**23, host_memory_bytes=2**23)
    settings = {"device": "cpu", "tokens_per_block": 4, "max_beam_width": 4, "max_seq_len": 128}
    return Engine(EngineConfig(model, lora=lora, **{**settings, **options}))


@pytest.fixture(scope="module")
def expected(plain: Engine, adapters: list[LoraInput | None]) -> list[list[Any]]:
    """Without drafts, one request after another."""
    return [[answers(run(plain, one)[0]) for one in requests(adapters, seed)] for seed in SEEDS]


@pytest.fixture(scope="module")
def plain(model: Path) -> Engine:
    return open_engine(model)


def requests(adapters: list[LoraInput | None], seed: int, count: int = 10) -> list[Request]:
    picks = random.Random(seed)
    made = []
    for _ in range(count):
        wish, streaming = picks.choice(WISHES), picks.random() < 0.5
        params = SamplingConfig(
            max_tokens=picks.randint(1, 40), logit_bias=BIAS, return_log_probs=True, **wish
        )
        prompt = (7, 8, 9, 10, 11, *(picks.choice(WORDS) for _ in range(picks.randint(1, 30))))
        made.append(Request(prompt, params, picks.choice(adapters), streaming and params.beam_width == 1))
    return made


def answers(events: list[Event]) -> list[Any]:
    """Of each sequence: tokens, log probabilities, beams, finish reason, logits."""
    found: dict[int, list[Any]] = {}
    for event in events:
        assert event.error is None
        one = found.setdefault(event.sequence_index, [[], [], (), None, []])
        one[0] += event.token_ids
        one[1] += event.log_probs
        one[2:4] = event.beams, event.finish_reason
        if event.generation_logits is not None:
            one[4] += event.generation_logits.tolist()
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_tokens": 16, "max_batch_size": 6, "ngram_use_oldest": False},
        {"max_tokens_in_paged_kv_cache": 200, "batch_scheduler_policy": "max_utilization"},
        {"enable_overlap": True, "max_batch_size": 5},
        {"enable_kv_cache_reuse": False, "max_draft_len": 1, "min_matching_ngram_size": 1},
    ],
    ids=["roomy", "chunks", "preempted", "overlapped", "one token"],
)
def test_every_bit_of_an_answer_is_that_without_drafts(
    options: dict[str, Any], model: Path, adapters: list[LoraInput | None], expected: Any, no_price: None
) -> None:
    drafting = open_engine(model, **{"max_draft_len": 5, **options})
    for seed in SEEDS:
        found = run(drafting, *requests(adapters, seed))
        assert [answers(events) for events in found] == expected[seed], seed
    stats = drafting.stats()
    assert stats.kv_blocks_free == stats.kv_blocks
    assert stats.draft_tokens >= stats.accepted_draft_tokens > 30
    if "max_utilization" in options.values():
        assert stats.preemptions


def test_drafts_save_steps_and_the_metrics_say_so(model: Path, plain: Engine, no_price: None) -> None:
    drafting = open_engine(model, max_draft_len=5)
    request = Request((7, *WORDS), SamplingConfig(max_tokens=60, logit_bias=BIAS))
    before = plain.stats().steps
    [expected], [[event]] = run(plain, request), run(drafting, request)
    assert event.token_ids == expected[0].token_ids
    stats, metrics = drafting.stats(), event.metrics
    assert metrics is not None
    assert stats.steps + metrics.accepted_draft_tokens == plain.stats().steps - before
    assert stats.steps < 40
    assert (metrics.draft_tokens, metrics.accepted_draft_tokens) == (
        stats.draft_tokens,
        stats.accepted_draft_tokens,
    )
    assert 0 < stats.drafts <= stats.draft_tokens
    [[without]] = run(drafting, replace(request, params=replace(request.params, use_drafts=False)))
    assert without.token_ids == event.token_ids and drafting.stats().draft_tokens == stats.draft_tokens


def test_a_draft_that_comes_with_a_request_is_the_only_one(model: Path, no_price: None) -> None:
    drafting = open_engine(model, max_draft_len=5)
    params = SamplingConfig(max_tokens=40, logit_bias=BIAS)
    [event] = run(drafting, Request((7, *WORDS), params, draft=(40, 41)))[0]
    assert drafting.stats().draft_tokens == 2
    assert event.metrics is not None and event.metrics.draft_tokens == 2


def test_only_a_sequences_own_tokens_are_drafted(
    model: Path, adapters: list[LoraInput | None], monkeypatch: pytest.MonkeyPatch, no_price: None
) -> None:
    """Another tenant's prompt is never proposed, not even under the same adapter."""
    seen: list[tuple[list[int], list[int]]] = []
    find = NgramIndex.find

    def watched(index: NgramIndex, tokens: list[int], count: int) -> list[int]:
        seen.append((list(tokens), find(index, tokens, count)))
        return seen[-1][1]

    monkeypatch.setattr(NgramIndex, "find", watched)
    drafting = open_engine(model, max_draft_len=5, min_matching_ngram_size=1)
    params = SamplingConfig(max_tokens=20, logit_bias=BIAS)
    secret = Request((*WORDS, 200, *WORDS, 201, *WORDS, 202), params, adapters[1])
    other = Request((7, *WORDS, 8), params, adapters[1])
    run(drafting, secret, other, replace(other, prompt=(9, *WORDS)))
    assert any(draft for _, draft in seen)
    for tokens, draft in seen:
        assert set(draft) <= set(tokens)


@pytest.mark.parametrize(("family", "kind"), [("t5", "encoder-decoder models"), ("qwen3-next", "recurrent")])
def test_models_that_cannot_take_drafts_back_refuse_them(family: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"max_draft_len 5: drafts .* not supported on .*{kind}"):
        open_engine(make_model(tmp_path / "model", family), max_draft_len=5, max_beam_width=1)


def test_the_openai_server_drafts_with_adapters_and_counts(no_price: None) -> None:
    body = {"prompt": "one two one two one two one", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    ids = {str(token): 100 for token in range(40, 44)}
    found = []
    for sections in ({}, {"speculative_config": NGramDecodingConfig(max_draft_len=5)}):
        server = Running(lora_root=(DEMO / "adapters",), sections=sections)
        try:
            answers = [server.post(model=name, logit_bias=ids, **body).json() for name in ("demo", "chinese")]
            found.append([answer["choices"][0]["text"] for answer in answers])
            drafts = server.metric("vllm:spec_decode_num_draft_tokens_total")
            accepted = server.metric('manylora_draft_tokens_total{state="accepted"}')
        finally:
            server.close()
    assert found[0] == found[1]
    assert drafts >= accepted > 0
