"""Protects pooled outputs: hidden states and the labels of heads, the base's and adapters' own, equal those
of transformers + PEFT in float32, in the same steps as generation, whatever is beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooled_adapters import hidden, logits, make_classifier, near
from running import check_greedy, pooled, read, run, tokens
from safetensors.torch import load_file, save_file
from tiny_models import make_adapter, make_model

from manylora.config.engine import EngineConfig, LoraCacheConfig
from manylora.engine.engine import Engine
from manylora.errors import AdapterInvalidError, ConfigError, RequestError
from manylora.model.checkpoint import read_model_config
from manylora.request import LoraInput, Pooling, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_tokens": 80, "max_batch_size": 16}


@pytest.fixture(scope="module")
def model(workshop: Path) -> Path:
    return make_model(workshop / "model", "llama", seed=1)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(EngineConfig(model, **SETTINGS))


def ask(ids: Sequence[int], mode: str = "last", head: bool = False, lora: LoraInput | None = None) -> Request:
    return Request(tuple(ids), lora=lora, pooling=Pooling(mode, head))


def test_hidden_states_of_the_base(engine: Engine, model: Path) -> None:
    ids = tokens(150, 5)  # in several chunks
    expected = hidden(model, ids)
    for _ in range(2):  # with blocks that are there already
        last, mean, every = pooled(engine, ask(ids), ask(ids, "mean"), ask(ids, "all"))
        assert near(last, expected[-1])
        assert near(mean, expected.mean(0))
        assert near(every, expected)


def test_heads_of_adapters_beside_generation(engine: Engine, model: Path, workshop: Path) -> None:
    three = make_classifier(workshop / "three", model, 3, 1)
    seven = make_classifier(workshop / "seven", model, 7, 2, "TOKEN_CLS")
    text = make_adapter(workshop / "text", model, 3)
    a, b, c = (read(workshop / name, model, task) for task, name in enumerate(("three", "seven", "text")))
    short, long = tokens(33, 6), tokens(120, 7)
    events = run(
        engine,
        ask(short, head=True, lora=a),
        ask(long, head=True, lora=a),
        ask(short, "all", head=True, lora=b),
        ask(long, "all", head=True, lora=b),
        Request(tuple(short), SamplingConfig(6), c),
        Request(tuple(long), SamplingConfig(6)),
        ask(long, lora=c),
    )
    found = [one[-1] for one in events]
    expected = [logits(three, short), logits(three, long), logits(seven, short), logits(seven, long)]
    for event, values in zip(found, expected, strict=False):
        assert event.pooled is not None
        assert near(event.pooled, values)
    check_greedy(found[4].token_ids, 6, model, text, short)
    check_greedy(found[5].token_ids, 6, model, None, long)
    assert not near(found[6].pooled, hidden(model, long)[-1])


def test_an_answer_does_not_depend_on_its_company(engine: Engine, model: Path, workshop: Path) -> None:
    make_classifier(workshop / "company", model, 4, 9)
    lora = read(workshop / "company", model, 9)
    one = ask(tokens(100, 1), head=True, lora=lora)
    [alone] = pooled(engine, one)
    others = [ask(tokens(60, seed), "mean") for seed in range(5)]
    assert np.array_equal(alone, pooled(engine, *others, one)[-1])


def test_eviction_and_reload(model: Path, workshop: Path) -> None:
    """A cache with room for one adapter: each comes back with its head."""
    lora = LoraCacheConfig(max_cpu_loras=1, max_loras=1, max_adapter_size=8)
    engine = Engine(EngineConfig(model, **SETTINGS, lora=lora))
    made = [make_classifier(workshop / f"evicted-{n}", model, n, n) for n in (2, 5)]
    loras = [read(workshop / f"evicted-{n}", model, n) for n in (2, 5)]
    ids = tokens(40, 3)
    for turn in (0, 1, 0, 1):
        assert near(pooled(engine, ask(ids, head=True, lora=loras[turn]))[0], logits(made[turn], ids))


def test_a_base_with_a_head_of_its_own(workshop: Path, model: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(4)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=4, dtype=torch.float32)
    base.config.pad_token_id = 0
    path = workshop / "headed"
    base.save_pretrained(path)
    own = make_classifier(workshop / "on-headed", path, 4, 8)
    engine = Engine(EngineConfig(path, **SETTINGS))
    ids = tokens(50, 4)
    lora = read(workshop / "on-headed", path, 1)
    found = pooled(engine, ask(ids, head=True), ask(ids, head=True, lora=lora))
    assert near(found[0], logits(base.eval(), ids))
    assert near(found[1], logits(own, ids))
    with pytest.raises(RequestError, match="no head for text"):
        engine.submit(engine.prepare(Request(tuple(ids), SamplingConfig(4))))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2"])
def test_a_bare_model(family: str, workshop: Path) -> None:
    """As embedding models are saved: without a head, and without its prefix in the names of tensors."""
    from transformers import AutoModel

    whole, path = make_model(workshop / family, family, seed=3), workshop / f"bare-{family}"
    AutoModel.from_pretrained(whole, dtype=torch.float32).save_pretrained(path)
    ids = tokens(30, 3)
    found = pooled(Engine(EngineConfig(path, **SETTINGS)), ask(ids), ask(ids, "all"))
    expected = hidden(whole, ids)
    assert near(found[0], expected[-1])
    assert near(found[1], expected)


def test_what_is_refused(engine: Engine, model: Path, workshop: Path) -> None:
    make_classifier(workshop / "only-labels", model, 2, 1)
    labels = read(workshop / "only-labels", model, 21)
    text = read(make_adapter(workshop / "only-text", model, 3), model, 22)
    ids = tuple(tokens(20, 1))
    for request, words in (
        (Request(ids, SamplingConfig(3), labels), "has a classification head"),
        (ask(ids, head=True, lora=text), "neither this adapter nor its base"),
        (ask(ids, head=True), "does not have a classification head"),
        (ask(ids, "cls"), "pooling must be last, mean or all"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.submit(engine.prepare(request))
    with pytest.raises(RequestError, match="leave streaming out"):
        Request(ids, pooling=Pooling(), streaming=True)
    engine.check()


def test_a_head_for_another_model(model: Path, workshop: Path) -> None:
    make_classifier(workshop / "right", model, 3, 1)
    wrong = workshop / "wrong"
    shutil.copytree(workshop / "right", wrong)
    stored = load_file(wrong / "adapter_model.safetensors")
    [key] = [name for name in stored if name.endswith("score.weight")]
    save_file({**stored, key: torch.zeros(3, 8)}, wrong / "adapter_model.safetensors")
    with pytest.raises(AdapterInvalidError, match="made for another model"):
        read(wrong, model)


def test_a_decoder_that_attends_both_ways_is_refused(model: Path, workshop: Path) -> None:
    path = workshop / "both-ways"
    shutil.copytree(model, path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "is_causal": False}))
    with pytest.raises(ConfigError, match="both directions"):
        read_model_config(path)


@pytest.mark.parametrize("overlap", [False, True])
def test_overlapped_steps_and_preemption(overlap: bool, model: Path) -> None:
    """With too few blocks for all, sequences are computed again; the values stay."""
    few = {"max_tokens_in_paged_kv_cache": 320, "batch_scheduler_policy": "max_utilization"}
    engine = Engine(EngineConfig(model, **SETTINGS, **few, enable_overlap=overlap))
    prompts = [tokens(90, seed) for seed in range(3)]
    text = [Request(tuple(tokens(20, seed)), SamplingConfig(60)) for seed in (8, 9)]
    asked = [ask(ids, mode) for ids in prompts for mode in ("last", "mean")]
    found = run(engine, *text, *asked)
    for events, request in zip(found[2:], asked, strict=True):
        assert events[0].pooled is not None
        expected = hidden(model, request.prompt)
        assert request.pooling is not None
        assert near(events[0].pooled, expected[-1] if request.pooling.mode == "last" else expected.mean(0))
    for events, one in zip(found, text, strict=False):
        check_greedy(events[-1].token_ids, 60, model, None, one.prompt)
