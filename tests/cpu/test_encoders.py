"""Protects encoders, whose tokens see each other: hidden states, heads, pairs of texts and adapters equal
those of transformers + PEFT in float32, many prompts in one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooled_adapters import hidden, logits, make_classifier, near
from running import read, run, tokens

from manylora.config.engine import EngineConfig
from manylora.engine.engine import Engine
from manylora.errors import RequestError
from manylora.request import LoraInput, Pooling, Request, SamplingConfig

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("bert", "roberta", "xlm-roberta")
LINEARS = ["query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense"]
SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 130,
}  # fmt: skip


def make_encoder(path: Path, kind: str, auto: str = "AutoModel", **settings: Any) -> Path:
    import transformers

    torch.manual_seed(7)
    settings = {**SIZES, "type_vocab_size": 1 if "roberta" in kind else 2, **settings}
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path


def prompt(count: int, seed: int) -> list[int]:
    """Without the tokens of padding, which other positions are given."""
    return [token + 5 for token in tokens(count, seed)]


def engine_of(model: Path, dtype: str = "float32") -> Engine:
    return Engine(EngineConfig(model, device="cpu", dtype=dtype, max_num_tokens=128, max_batch_size=8))


def ask(
    ids: Sequence[int], mode: str = "cls", head: bool = False, lora: LoraInput | None = None, first: int = 0
) -> Request:
    return Request(tuple(ids), lora=lora, pooling=Pooling(mode, head, first))


def answers(engine: Engine, *requests: Request) -> list[np.ndarray]:
    found = []
    for [event] in run(engine, *requests):
        assert event.error is None
        assert event.pooled is not None
        found.append(event.pooled)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states(kind: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", kind)
    engine = engine_of(model)
    prompts = [prompt(count, count) for count in (100, 3, 60, 61, 1)]  # in two steps
    for _ in range(2):
        found = answers(engine, *(ask(ids, "all") for ids in prompts), *(ask(ids, "mean") for ids in prompts))
        for ids, every, mean in zip(prompts, found, found[5:], strict=False):
            expected = hidden(model, ids)
            assert near(every, expected)
            assert near(mean, expected.mean(0))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_adapters(kind: str, tmp_path: Path) -> None:
    base = make_encoder(tmp_path / "base", kind, "AutoModelForSequenceClassification", num_labels=4)
    own = make_classifier(tmp_path / "own", base, 3, 1, target_modules=LINEARS)
    each = make_classifier(tmp_path / "each", base, 5, 2, "TOKEN_CLS", target_modules=LINEARS)
    plain = _load(base)
    engine = engine_of(base)
    a, b = read(tmp_path / "own", base, 1), read(tmp_path / "each", base, 2)
    x, y = prompt(40, 1), prompt(17, 2)
    requests = [ask(x, head=True), ask(x, head=True, lora=a), ask(y, head=True, lora=a)]
    found = answers(engine, *requests, ask(y, "all", head=True, lora=b), ask(y, head=True))
    expected = [logits(plain, x), logits(own, x), logits(own, y), logits(each, y), logits(plain, y)]
    for ours, theirs in zip(found, expected, strict=True):
        assert near(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_no_farther_from_the_truth_than_transformers(kind: str, tmp_path: Path) -> None:
    model, ids = make_encoder(tmp_path / "model", kind), prompt(60, 4)
    [found] = answers(engine_of(model, "bfloat16"), ask(ids, "all"))
    truth = hidden(model, ids)
    import transformers

    with torch.inference_mode():
        narrow = transformers.AutoModel.from_pretrained(model, dtype=torch.bfloat16)
        theirs = narrow(torch.tensor([ids])).last_hidden_state[0].float().numpy()
    ours, theirs = (np.median(np.sqrt(np.square(one - truth).mean(-1))) for one in (found, theirs))
    assert ours <= 1.3 * theirs


def test_two_texts(tmp_path: Path) -> None:
    base = make_encoder(tmp_path / "base", "bert", "AutoModelForSequenceClassification", num_labels=1)
    ids = prompt(20, 3)
    with torch.inference_mode():
        types = torch.tensor([[0] * 8 + [1] * 12])
        expected = _load(base)(torch.tensor([ids]), token_type_ids=types).logits[0].numpy()
    found = answers(engine_of(base), ask(ids, head=True, first=8), ask(ids, head=True))
    assert near(found[0], expected)
    assert not near(found[1], expected)


def test_what_is_refused(tmp_path: Path) -> None:
    engine = engine_of(make_encoder(tmp_path / "base", "bert"))
    for request, words in (
        (Request((5, 6), SamplingConfig(3)), "no head for text"),
        (ask([5, 6], head=True), "does not have a classification head"),
        (ask([5] * 129), "exceeds maximum input length"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.submit(engine.prepare(request))


def _load(model: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
