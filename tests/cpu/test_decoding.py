"""Protects the ways to decode beside plain sampling: beam search against transformers, drafts, logits, prompt
embeddings, penalties, retention; each in company, and nothing leaks. With drafts by n-grams every token and
log probability is the one without them, whatever is in the batch, whatever ends in the middle of a draft, and
nothing of another request is drafted.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penalties import most_probable, tensorrt_llm
from running import read, tokens_of
from running import run as run_engine
from serving import DEMO, Running
from tiny_models import make_adapter, make_model, reference_generate, reference_logits

from manylora.adapters.convert import convert_peft
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.doors.python.llm_args import NGramDecodingConfig
from manylora.engine.engine import Engine
from manylora.engine.speculation import NgramIndex, StepTimes
from manylora.errors import ConfigError, RequestError
from manylora.request import Event, LoraInput, Request, Retention, SamplingConfig

NEW = 10
PROMPT = (72, 101, 108, 108, 111, 33, 5, 9, 77)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("decoding") / "model", seed=2)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return make_adapter(model.parent / "adapter", model, seed=5, rank=4)


def open_engine(model: Path, **options: Any) -> Engine:
    lora = LoraCacheConfig(gpu_memory_bytes=2**23, host_memory_bytes=2**23)
    settings = {"device": "cpu", "tokens_per_block": 4, "max_beam_width": 5, **options}
    return Engine(EngineConfig(model, lora=lora, **settings))


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return open_engine(model)


def run(engine: Engine, *requests: Request) -> list[list[Event]]:
    events = run_engine(engine, *requests)
    stats = engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks
    return events


def beams_of_transformers(model: Path, adapter: Path | None, **options: object) -> list[list[int]]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        loaded = PeftModel.from_pretrained(loaded, str(adapter))
    loaded.eval()
    width = options["num_beams"]
    ids = loaded.generate(
        input_ids=torch.tensor([PROMPT]),
        max_new_tokens=NEW,
        do_sample=False,
        num_return_sequences=width,
        **options,
    )
    rows = [row[len(PROMPT) :].tolist() for row in ids]
    end_id = options["eos_token_id"]
    return [row[: row.index(end_id)] if end_id in row else row for row in rows]


@pytest.mark.parametrize("width", [2, 5, 3])
@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_beam_search_finds_what_transformers_finds(
    engine: Engine, model: Path, adapter: Path, width: int, early_stopping: bool, with_adapter: bool
) -> None:
    lora = LoraInput(1, *convert_peft(adapter, "float32")) if with_adapter else None
    greedy = reference_generate(model, adapter if with_adapter else None, PROMPT, NEW)
    for end_id, penalty in ((greedy[3], 1.0), (greedy[1], 0.0), (300, 2.0)):
        params = SamplingConfig(
            max_tokens=NEW,
            end_id=end_id,
            beam_width=width,
            early_stopping=early_stopping,
            length_penalty=penalty,
        )
        others = [Request((7, i + 1), SamplingConfig(max_tokens=4)) for i in range(3)]
        found, *_ = run(engine, Request(PROMPT, params, lora), *others)
        [event] = found
        expected = beams_of_transformers(
            model, adapter if with_adapter else None, num_beams=width, early_stopping=early_stopping,
            length_penalty=penalty, eos_token_id=end_id, pad_token_id=258,
        )  # fmt: skip
        mine = [list(beam.token_ids) for beam in event.beams]
        assert mine == expected


def test_beams_score_what_the_model_says_and_survive_a_full_cache(model: Path, engine: Engine) -> None:
    params = SamplingConfig(max_tokens=NEW, beam_width=4, return_log_probs=True)
    tight = open_engine(model, max_tokens_in_paged_kv_cache=96, batch_scheduler_policy="max_utilization")
    cases = [Request((*PROMPT, i), params) for i in range(6)]
    plain = [Request((*PROMPT, i), SamplingConfig(max_tokens=40)) for i in range(6)]
    everything = [case for pair in zip(cases, plain, strict=True) for case in pair]
    roomy = run(engine, *everything)
    for mine, other in zip(run(tight, *everything), roomy, strict=True):
        assert [b.token_ids for b in mine[-1].beams] == [b.token_ids for b in other[-1].beams]
        assert tokens_of(mine) == tokens_of(other)
    [event] = roomy[0]
    assert len(event.beams) == 4
    for beam in event.beams:
        ids = [*PROMPT, 0, *beam.token_ids]
        logits = reference_logits(model, None, ids).log_softmax(-1)
        expected = [logits[len(PROMPT) + i, token].item() for i, token in enumerate(beam.token_ids)]
        np.testing.assert_allclose(beam.log_probs, expected, atol=1e-4)
        assert beam.cum_log_prob == pytest.approx(sum(expected), abs=1e-3)
    scores = [beam.cum_log_prob for beam in event.beams]
    assert scores == sorted(scores, reverse=True)


PENALTIES = [  # below 0 they prefer what is there already, so that it shows what was counted
    {"presence_penalty": -6.0},
    {"frequency_penalty": -3.0, "temperature": 0.5},
    {"frequency_penalty": -4.0, "prompt_ignore_length": 4},
    {"presence_penalty": 1.0, "frequency_penalty": -4.0, "repetition_penalty": 1.4, "temperature": 3.0},
]


def test_penalties_in_company_and_after_preemptions(model: Path, engine: Engine, adapter: Path) -> None:
    """Counts are each sequence's own, and survive when it is evicted and comes back."""
    tight = open_engine(model, max_tokens_in_paged_kv_cache=64, batch_scheduler_policy="max_utilization")
    prompt = [0, 1, 0, 2, 0, *PROMPT]
    lora = LoraInput(1, *convert_peft(adapter, "float32"))
    requests, expected = list[Request](), list[list[int]]()
    for number, case in enumerate(PENALTIES):
        used = adapter if number % 2 else None
        params = SamplingConfig(max_tokens=NEW, top_k=1, **case)
        requests.append(Request(tuple(prompt), params, lora if used else None))
        expected.append(most_probable(tensorrt_llm, model, used, prompt, NEW, **case))
    assert len({tuple(one) for one in expected}) == len(expected)
    mates = [Request((*PROMPT, i), SamplingConfig(max_tokens=30)) for i in range(4)]
    for one in (engine, tight):
        found = run(one, *requests, *mates)
        assert [tokens_of(events) for events in found[: len(requests)]] == expected


def test_beams_are_scored_with_penalties_and_temperature(engine: Engine, model: Path) -> None:
    case = {"frequency_penalty": 0.7, "presence_penalty": 0.2, "temperature": 0.6, "prompt_ignore_length": 3}
    params = SamplingConfig(max_tokens=NEW, beam_width=4, return_log_probs=True, **case)
    [[event]] = run(engine, Request(PROMPT, params))
    for beam in event.beams:
        for i, token in enumerate(beam.token_ids):
            before = list(beam.token_ids[:i])
            logits = reference_logits(model, None, [*PROMPT, *before])[-1].numpy()
            adjusted = torch.from_numpy(tensorrt_llm(logits, list(PROMPT), before, **case))
            assert beam.log_probs[i] == pytest.approx(adjusted.log_softmax(-1)[token].item(), abs=1e-4)


@pytest.mark.parametrize("right", [0, 1, 3, 5])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_changes_the_steps_and_not_the_tokens(engine: Engine, right: int, sampled: bool) -> None:
    options = {"top_p": 0.9, "seed": 3, "temperature": 2.0} if sampled else {}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4}
    params = SamplingConfig(max_tokens=NEW, return_log_probs=True, **penalties, **options)
    [plain] = run(engine, Request(PROMPT, params))
    truth = tokens_of(plain)
    draft = (*truth[:right], *((token + 1) % 250 for token in truth[right:6]))
    before = engine.stats().steps
    [event] = run(engine, Request(PROMPT, params, draft=draft))[0]
    assert event.token_ids == plain[-1].token_ids
    np.testing.assert_allclose(event.log_probs, plain[-1].log_probs, atol=1e-4)
    assert engine.stats().steps - before == NEW - right
    assert event.metrics is not None
    assert (event.metrics.draft_tokens, event.metrics.accepted_draft_tokens) == (6, right)


def test_prompt_embeddings_stand_for_tokens(engine: Engine, model: Path) -> None:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "np") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
    table = embedding[[PROMPT[2], PROMPT[5]]]
    vocab = len(embedding)
    virtual = tuple(vocab if i == 2 else vocab + 1 if i == 5 else t for i, t in enumerate(PROMPT))
    params = SamplingConfig(max_tokens=NEW, repetition_penalty=1.0)
    truth = tokens_of(run(engine, Request(PROMPT, params))[0])
    other = Request(virtual, params, prompt_table=table[::-1].copy())
    found = run(engine, Request(virtual, params, prompt_table=table), other)
    assert tokens_of(found[0]) == truth
    assert tokens_of(found[1]) != truth, "another table under the same ids is another prompt"
    assert tokens_of(run(engine, Request(virtual, params, prompt_table=table))[0]) == truth
    with pytest.raises(RequestError, match="prompt_embedding_table must hold finite rows of 64 values"):
        engine.prepare(Request(virtual, params, prompt_table=table[:, :8]))
    with pytest.raises(RequestError, match=r"input_ids must be in \[0, 273\)"):
        engine.prepare(Request(virtual, params, prompt_table=table[:1]))


def test_retained_prompts_outlive_others(model: Path) -> None:
    made = open_engine(model, max_tokens_in_paged_kv_cache=64)
    keep = Request(
        tuple(range(20, 40)), SamplingConfig(max_tokens=2), retention=Retention(((0, None, 100, None),), 0)
    )
    run(made, keep)
    for i in range(12):
        run(made, Request(tuple(range(100 + i, 120 + i)), SamplingConfig(max_tokens=2)))
    [[event]] = run(made, keep)
    assert event.metrics is not None
    assert event.metrics.kv_reused_blocks == 4, "all blocks but the one with the last prompt token"
    for bad in (((0, 0, 50, None),), ((0, None, 101, None),)):
        with pytest.raises(RequestError, match="retention_token_range"):
            Retention(bad)


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
def adapters(model: Path) -> list[LoraInput | None]:
    folders = [make_adapter(model.parent / str(i), model, seed=i, **kind) for i, kind in enumerate(KINDS)]
    return [None, *(read(folder, model, i + 1) for i, folder in enumerate(folders))]


@pytest.fixture
def no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether to draft is not to depend on this machine's times."""
    monkeypatch.setattr(StepTimes, "price", lambda *_: 0.0)


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
