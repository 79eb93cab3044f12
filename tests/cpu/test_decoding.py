"""Protects the ways to decode beside plain sampling: beam search against transformers, drafts, guides,
logits, prompt embeddings, decaying top-p, retention; each in company, and nothing leaks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from penalties import most_probable, tensorrt_llm
from running import check_greedy, tokens_of
from running import run as run_engine
from tiny_models import make_adapter, make_model, reference_generate, reference_logits

from manylora.adapters.convert import convert_peft
from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import RequestError
from manylora.generation.tokenizer import Tokenizer
from manylora.request import Event, Guide, LoraInput, Request, Retention, SamplingConfig

NEW = 10
PROMPT = (72, 101, 108, 108, 111, 33, 5, 9, 77)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("decoding") / "model", seed=2)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return make_adapter(model.parent / "adapter", model, seed=5, rank=4)


def open_engine(model: Path, **options: object) -> Engine:
    lora = LoraCacheConfig(gpu_memory_bytes=2**22, host_memory_bytes=2**22)
    settings = {"device": "cpu", "tokens_per_block": 4, "max_beam_width": 8, **options}
    return Engine(EngineConfig(model, lora=lora, **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return open_engine(model, tokenizer_dir=model)


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


def test_a_draft_is_verified_across_chunks_and_preemption(model: Path, engine: Engine) -> None:
    small = {
        "max_num_tokens": 8,
        "max_batch_size": 4,
        "max_beam_width": 2,
        "max_tokens_in_paged_kv_cache": 64,
    }
    tight = open_engine(model, batch_scheduler_policy="max_utilization", **small)
    params = SamplingConfig(max_tokens=NEW)
    truth = {i: tokens_of(run(engine, Request((*PROMPT, i), params))[0]) for i in range(5)}
    requests = [Request((*PROMPT, i), params, draft=tuple(truth[i][:4])) for i in range(5)]
    assert [tokens_of(events) for events in run(tight, *requests)] == list(truth.values())


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


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("streaming", [False, True])
def test_guided_output_matches_its_guide(engine: Engine, model: Path, adapter: Path, streaming: bool) -> None:
    guides = {
        "json_schema": (Guide("json_schema", json.dumps(SCHEMA)), lambda t: len(json.loads(t)) == 2),
        "regex": (Guide("regex", r"[a-c]{3}-\d{2}"), re.compile(r"[a-c]{3}-\d{2}").fullmatch),
        "ebnf": (Guide("ebnf_grammar", 'root ::= "yes" | "no"'), {"yes", "no"}.__contains__),
    }  # fmt: skip
    lora = LoraInput(1, *convert_peft(adapter, "float32"))
    requests = [
        Request(
            PROMPT,
            SamplingConfig(max_tokens=60, end_id=257, top_p=0.9, seed=seed, guide=guide),
            lora,
            streaming,
        )
        for guide, _ in guides.values()
        for seed in range(3)
    ]
    free = Request(PROMPT, SamplingConfig(max_tokens=NEW), lora)
    *found, last = run(engine, *requests, free)
    tokenizer = Tokenizer(model)
    for number, events in enumerate(found):
        name = list(guides)[number // 3]
        text = tokenizer.decode(tokens_of(events))
        assert guides[name][1](text), (name, text)  # type: ignore[operator]
        assert events[-1].finish_reason is not None
        assert events[-1].finish_reason.value == "stop"
    check_greedy(tokens_of(last), NEW, model, adapter, PROMPT)


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
