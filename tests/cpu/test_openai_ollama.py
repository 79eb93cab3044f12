"""Protects Ollama's API: its bodies, its lines, its names and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import QUESTION, WEATHER, Running

from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.ollama_request import OllamaChat, OllamaGenerate, chat_request
from manylora.doors.http.api.parsing import parse
from manylora.doors.http.serving.ollama import OllamaAnswer
from manylora.doors.http.serving.responses import Answers

CHAT: dict[str, Any] = {"model": "demo", "messages": QUESTION}
GREEDY = {"temperature": 0}
COUNTS = {
    "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count",
    "eval_duration",
}  # fmt: skip


def lines(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_streams_lines_and_ends_with_counts(server: Running) -> None:
    found = lines(server, "/api/chat", model="chinese:latest", messages=QUESTION, options=GREEDY)
    assert all(one["model"] == "chinese:latest" for one in found)
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    assert "".join(one["message"]["content"] for one in found).strip() == "巴黎"
    last = found[-1]
    assert last["done_reason"] == "stop" and set(last) >= COUNTS
    assert all(last[name] >= 1 for name in COUNTS)
    assert last["total_duration"] >= last["eval_duration"]
    whole = server.post("/api/chat", model="chinese", messages=QUESTION, options=GREEDY, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "巴黎"} or whole["message"]["content"].strip()
    assert (whole["eval_count"], whole["prompt_eval_count"]) == (
        last["eval_count"],
        last["prompt_eval_count"],
    )


def test_results_of_tools_find_their_calls() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"city": "Rome"}}}

    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b"), call("a")]},
        {"role": "tool", "tool_name": "b", "content": "1"},
        {"role": "tool", "tool_name": "a", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    raw = json.dumps({"model": "m", "messages": messages, "tools": [WEATHER]}).encode()
    found = chat_request(parse(raw, OllamaChat), "m")
    assert [one.id for one in found.messages[1].tool_calls] == ["call_0", "call_1", "call_2"]
    assert [one.tool_call_id for one in found.messages[2:]] == ["call_1", "call_0", "call_2"]
    assert json.loads(found.messages[1].tool_calls[0].function.arguments) == {"city": "Rome"}
    assert found.tools[0].function.name == "weather"


def test_log_probabilities_come_with_the_text(server: Running) -> None:
    body: Any = {"model": "demo", "messages": QUESTION, "logprobs": True, "top_logprobs": 2}
    found = lines(server, "/api/chat", **body, options={**GREEDY, "num_predict": 3})
    tokens = [one for line in found for one in line.get("logprobs", ())]
    assert len(tokens) == 3 and all(len(one["top_logprobs"]) == 2 for one in tokens)


def test_a_request_without_a_question_loads_the_model(server: Running) -> None:
    answer = server.post("/api/generate", model="chinese")
    assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "load")
    answer = server.post("/api/chat", model="chinese", messages=[], keep_alive=0)
    assert answer.json()["done_reason"] == "unload"
    assert server.post("/api/generate", model="nobody").status_code == 404


def test_a_long_chat_loses_its_beginning_as_there(server: Running) -> None:
    long = [{"role": "user", "content": "France and Paris. " * 20} for _ in range(80)] + QUESTION
    body: Any = {"model": "demo", "messages": long, "stream": False, "options": {"num_predict": 2}}
    assert server.post("/api/chat", **body).json()["prompt_eval_count"] > 100
    answer = server.post("/api/chat", **body, truncate=False)
    assert answer.status_code == 400 and "context" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "hint"),
    [
        ("/api/chat", {**CHAT, "model": "nobody"}, 404, "'nobody' does not exist"),
        ("/api/chat", {"messages": QUESTION}, 400, "model is required"),
        ("/api/chat", {**CHAT, "think": True}, 400, "does not support thinking"),
        ("/api/chat", {**CHAT, "messages": [{**QUESTION[0], "images": ["aa"]}]}, 400, "images"),
        ("/api/generate", {"model": "demo", "prompt": "a", "context": [1]}, 400, "send the conversation"),
        ("/api/pull", {"model": "demo"}, 404, "/api/pull is not served"),
    ],
)  # fmt: skip
def test_errors_are_one_line_in_its_own_form(
    server: Running, path: str, body: dict[str, Any], status: int, hint: str
) -> None:
    [(name, text)] = server.ask(path, status, **body).items()
    assert name == "error" and hint in text and "\n" not in text


def test_a_stream_that_fails_ends_with_the_reason() -> None:
    body = parse(b'{"model": "demo"}', OllamaChat)
    nothing: Any = None
    answer = OllamaAnswer(body, 0, Answers([], 1, "demo", "fp", nothing))
    last = answer.error_events(ApiError(503, "engine_dead", "It stopped"))
    assert json.loads(last) == {"error": "It stopped"} and last.endswith(b"}\n")


def test_any_content_type_is_taken_as_curl_sends_it(server: Running) -> None:
    body = json.dumps({"model": "demo", "prompt": "a", "stream": False, "options": {"num_predict": 1}})
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = server.http.post("/api/generate", content=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["done"]


def test_nulls_count_as_left_out() -> None:
    raw = b'{"model": "m", "prompt": "a", "format": null, "options": {"seed": null, "stop": null}}'
    found = chat_request(parse(raw, OllamaGenerate), "m")
    assert found.seed is None and found.response_format is None
    with pytest.raises(ApiError, match="repeat_last_n"):
        options = {"repeat_penalty": 1.1, "repeat_last_n": 64}
        body = {"model": "m", "prompt": "a", "options": options}
        chat_request(parse(json.dumps(body).encode(), OllamaGenerate), "m")
