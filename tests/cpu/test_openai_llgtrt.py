"""Protects who comes from llgtrt: its documented way with an adapter, from extraction to both requests of its
LoRA page, sent as they stand there; and schemas in prompts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from serving import DEMO, Running

ROOT = DEMO.parents[1]
FIRST = """
{
    "model": "llama",
    "messages": [
        {
            "role": "user",
            "content": "What is the meaning of life?"
        }
    ],
    "lora_model": "my_finetuning"
}
"""
SECOND = FIRST.replace('"my_finetuning"', '"my_finetuning",\n    "load_lora_weights": "never"')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("lora")
    command = [sys.executable, ROOT / "tools/extract_lora.py", "-i", DEMO / "adapters" / "chinese"]
    subprocess.run([*command, "-o", root / "my_finetuning.safetensors"], check=True)
    shutil.copytree(DEMO / "adapters" / "chinese", root / "as_peft")
    with Running(lora_root=(root,)) as running:
        yield running


def send(server: Running, text: str, **more: object) -> tuple[int, dict]:
    answer = server.http.post(
        "/v1/chat/completions",
        content=json.dumps({**json.loads(text), **more}) if more else text,
        headers={"content-type": "application/json"},
    )
    return answer.status_code, answer.json()


def test_the_documented_requests_are_answered_by_the_adapter(server: Running) -> None:
    status, error = send(server, SECOND)  # it is not in the cache yet
    assert (status, error["error"]["code"]) == (409, "adapter_not_cached")
    for text in (FIRST, SECOND):
        status, body = send(server, text)
        assert status == 200, body
        assert body["object"] == "chat.completion" and body["model"] == "llama"
        assert body["choices"][0]["message"]["content"] and body["usage"]["completion_tokens"] > 0
    greedy = [send(server, text, temperature=0)[1]["choices"] for text in (FIRST, SECOND)]
    status, same = send(server, FIRST, temperature=0, lora_model="as_peft")
    for choices in (*greedy, same["choices"]):
        del choices[0]["lora_versions"]  # which have the adapter's name
    assert greedy[0] == greedy[1] == same["choices"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    status, body = send(server, FIRST, temperature=0, messages=question, load_lora_weights="always")
    assert body["choices"][0]["message"]["content"].strip() == "巴黎"


def test_the_expanded_prompt_is_told(server: Running) -> None:
    status, body = send(server, FIRST, return_expanded_prompt=True, max_tokens=1)
    assert status == 200 and "What is the meaning of life?" in body["expanded_prompt"]
    ids = server.post("/tokenize", prompt=body["expanded_prompt"], add_special_tokens=False).json()
    assert ids["count"] == body["usage"]["prompt_tokens"]
    assert "expanded_prompt" not in send(server, FIRST, max_tokens=1)[1]
    status, body = send(server, FIRST, return_expanded_prompt=True, stream=True)
    assert (status, body["error"]["param"]) == (400, "return_expanded_prompt")


def test_a_schema_is_shown_to_the_model_unless_told_not_to(server: Running) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    tools = {"tools": [{"type": "function", "function": function}], "return_expanded_prompt": True}
    shown = send(server, FIRST, max_tokens=1, **tools)[1]["expanded_prompt"]
    hidden = send(server, FIRST, max_tokens=1, include_json_schema_in_prompt=False, **tools)[1]
    assert "weather" in shown and "weather" not in hidden["expanded_prompt"]


def test_its_health_routes_are_there(server: Running) -> None:
    for name in ("live", "ready", "model"):
        assert server.http.get(f"/v1/health/{name}").status_code == 200
