"""Protects adapters' own tokenizers: added tokens at every door, the base's ids unchanged, bounded memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_text import LAST, shortened, with_token
from serving import DEMO, Running

from manylora.adapters.catalog.texts import TrustedFolder

PROMPT = "What is the capital of France?\nAnswer:"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    spec = shortened()
    (root / "base").mkdir()
    settings = json.loads((DEMO / "base" / "tokenizer_config.json").read_text())
    moved = with_token(spec, "<|sql|>")
    first = next(token for token, number in spec["model"]["vocab"].items() if number == 9)
    other = next(token for token, number in spec["model"]["vocab"].items() if number == 10)
    moved["model"]["vocab"] |= {first: 10, other: 9}
    tokenizers = {
        "sql": with_token(spec, "<|sql|>"),
        "act": with_token(spec, "<|act|>"),
        "same": spec,
        "moved": moved,
        "large": with_token(with_token(spec, "<|sql|>"), "<|more|>", LAST + 1),
        "broken": {"model": 1},
    }
    for name, made in tokenizers.items():
        folder = shutil.copytree(DEMO / "adapters" / "chinese", root / "adapters" / name)
        (folder / "tokenizer.json").write_text(json.dumps(made))
    (root / "base" / "tokenizer.json").write_text(json.dumps(spec))
    (root / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    changed = {**settings, "eos_token": "<|sql|>"}
    (root / "adapters" / "sql" / "tokenizer_config.json").write_text(json.dumps(changed))
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Running]:
    trusted = TrustedFolder(root / "adapters", ("tokenizer",))
    options = {"lora_root": (root / "adapters",), "lora_trust": (trusted,), "lora_tokenizer_bytes": 1}
    with Running(tokenizer=root / "base", **options) as running:
        yield running


def forced(server: Running, model: str, **body: Any) -> dict[str, Any]:
    """An answer of three times the last token."""
    given: dict[str, Any] = {
        "prompt": PROMPT,
        "allowed_token_ids": [LAST],
        "max_tokens": 3,
        "skip_special_tokens": False,
        "ignore_eos": True,
    }
    answer = server.ask(model=model, temperature=0, **{**given, **body})
    return answer["choices"][0]


def test_an_added_token_is_one_token_of_its_adapter_only(server: Running) -> None:
    tokens = lambda model: server.post("/tokenize", model=model, prompt="a<|sql|>").json()["tokens"]  # noqa: E731
    assert tokens("sql")[-1] == LAST
    for model in ("demo", "act", "same"):
        assert LAST not in tokens(model)
    assert server.post("/detokenize", model="sql", tokens=[LAST]).json()["prompt"] == "<|sql|>"
    for model, text in {"sql": "<|sql|>", "act": "<|act|>"}.items():
        choice = forced(server, model, logprobs=0)
        assert choice["text"] == 3 * text
        assert choice["logprobs"]["tokens"] == 3 * [text]
        assert forced(server, model, skip_special_tokens=True)["text"] == ""
        assert forced(server, model, echo=True, prompt=text, add_special_tokens=False)["text"] == 4 * text
    assert "<|" not in forced(server, "demo")["text"]


def test_texts_that_end_an_answer_are_in_its_adapters_tokens(server: Running) -> None:
    assert forced(server, "act", stop=["<|act|>"])["finish_reason"] == "stop"
    assert forced(server, "act", stop=["<|sql|>"])["finish_reason"] == "length"
    assert forced(server, "sql", ignore_eos=False)["finish_reason"] == "stop"  # its own eos_token
    assert forced(server, "act", ignore_eos=False)["finish_reason"] == "length"


def test_streams_and_guides_work(server: Running) -> None:
    body = {"model": "sql", "prompt": PROMPT, "allowed_token_ids": [LAST], "max_tokens": 3}
    body |= {"skip_special_tokens": False, "ignore_eos": True, "stream": True}
    lines = server.post(**body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(one["choices"][0]["text"] for one in chunks) == 3 * "<|sql|>"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = server.post("/v1/chat/completions", model="sql", messages=question, guided_choice=["yes", "no"])
    assert answer.json()["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("moved", "it may add tokens, and change none"),
        ("large", "the base model has room for ids below 1536"),
        ("broken", "is no tokenizer"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(server: Running, name: str, reason: str) -> None:
    answer = server.post(model=name, prompt=PROMPT)
    assert answer.status_code == 422
    assert reason in answer.json()["error"]["message"]
    assert "/" not in answer.json()["error"]["message"]
