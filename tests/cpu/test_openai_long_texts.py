"""Protects the neighbours of who sends a book: refused by its size at every door, before it is rendered,
tokenised or validated whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Running

from manylora.errors import RequestError, TextTooLongError
from manylora.generation.chat_template import ChatTemplate

BOOK = "a" * 15 * 2**20
NESTED: Any = json.loads("[" * 100 + "]" * 100)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running() as running:
        yield running


TOO_LONG = {
    "completion": ("/v1/completions", {"prompt": BOOK}, "prompt", "characters: in the context of 2048"),
    "one of many": ("/v1/completions", {"prompt": ["a", BOOK]}, "prompt", "has 15728640 characters"),
    "chat": ("/v1/chat/completions", {"messages": user(BOOK)}, "messages", "at most 524288 are taken"),
    "sum": ("/v1/chat/completions", {"messages": user("a" * 2**16) * 9}, "messages", "has 589824 char"),
    "rendered": ("/v1/chat/completions", {"messages": user("a" * 2**17)}, "messages", "tokens already"),
    "many empty messages": ("/v1/chat/completions", {"messages": user("") * 4096}, "messages", "4098"),
    "cut": ("/v1/completions", {"prompt": BOOK, "truncate_prompt_tokens": 8}, "prompt", "at most 524288"),
    "tokenize": ("/tokenize", {"prompt": BOOK}, "prompt", "at most 524288 are taken"),
    "tokenize messages": ("/tokenize", {"messages": user(BOOK)}, "messages", "at most 524288 are taken"),
    "beginning": ("/v1/completions", {"prompt": "ab c" * 6000}, "prompt", "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOO_LONG)
def test_a_text_that_cannot_fit_is_refused_by_its_length(server: Running, case: str) -> None:
    path, body, field, words = TOO_LONG[case]
    answer = server.post(path, **({"max_tokens": 1} if path.startswith("/v1") else {}), **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert words in error["message"]


def test_what_need_not_fit_is_tokenised_all_the_same(server: Running) -> None:
    text = "The capital of France is Paris. " * 1000
    counted = server.post("/tokenize", prompt=text).json()
    assert counted["count"] > 4000
    assert server.post("/detokenize", tokens=counted["tokens"]).json()["prompt"].endswith(text)
    answer = server.post(prompt=text, truncate_prompt_tokens=9, max_tokens=1)
    assert answer.json()["usage"]["prompt_tokens"] == 9


def test_too_many_prompts_are_refused_before_the_first_is_tokenised(server: Running) -> None:
    answer = server.post(prompt=["a"] * 200_000, max_tokens=1)
    assert answer.status_code == 400
    assert "at most 256 outputs" in answer.json()["error"]["message"]


def template(tmp_path: Path, text: str) -> ChatTemplate:
    return ChatTemplate.read(tmp_path, {"chat_template": text})


def test_a_template_stops_where_its_text_becomes_too_long(tmp_path: Path) -> None:
    repeats = template(
        tmp_path, "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}"
    )
    messages = user("a" * 100) * 1000  # 100 MB, were it rendered whole
    with pytest.raises(TextTooLongError, match="too long a text"):
        repeats.render(messages, most=2**16)
    assert repeats.render(user("ab") * 2) == "ab" * 4


def test_indented_json_of_deep_lists_does_not_grow_without_end(tmp_path: Path) -> None:
    indented = template(tmp_path, "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}")
    assert indented.render(user("a"), [tool({"a": [1]})]).count("\n") > 5
    with pytest.raises(RequestError, match="too long a text"):
        indented.render(user("a"), [tool({"a": [NESTED] * 400})])  # 80 kB, and 16 MB indented
