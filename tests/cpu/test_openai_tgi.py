"""Protects TGI's and LoRAX's API: bodies, tokens, streams and errors, with their own clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError
from serving import Running

QUESTION = "What is the capital of France?"
MORE = "parameters."


@pytest.fixture(scope="module")
def client(server: Running) -> InferenceClient:
    return InferenceClient(base_url=server.url)


def answer(server: Running, path: str = "/generate", **parameters: Any) -> Any:
    return server.ask(path, inputs=QUESTION, parameters=parameters)


def test_an_adapter_answers_as_by_its_completion(server: Running, client: InferenceClient) -> None:
    usual = server.post(model="chinese", prompt=QUESTION, temperature=0, max_tokens=8, logprobs=0).json()
    choice = usual["choices"][0]
    assert client.text_generation(QUESTION, adapter_id="chinese", max_new_tokens=8) == choice["text"]
    found = client.text_generation(QUESTION, adapter_id="chinese", max_new_tokens=8, details=True)
    details = found.details
    assert details.finish_reason == "eos_token" and details.seed is None
    assert [one.text for one in details.tokens] == [*choice["logprobs"]["tokens"], "</s>"]
    shown = [one.logprob for one in details.tokens[:-1]]
    assert shown == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert details.generated_tokens == len(details.tokens) and details.tokens[-1].special


def test_a_stream_has_an_event_per_token_and_ends_with_the_whole(client: InferenceClient) -> None:
    given: Any = {"adapter_id": "japanese", "max_new_tokens": 6, "return_full_text": True, "details": True}
    whole = client.text_generation(QUESTION, **given)
    events = list(client.text_generation(QUESTION, **given, stream=True))
    assert [one.token.id for one in events] == [one.id for one in whole.details.tokens]
    assert [one.index for one in events] == list(range(1, len(events) + 1))
    assert [one.generated_text for one in events] == [None] * (len(events) - 1) + [whole.generated_text]
    shown = "".join(one.token.text for one in events if not one.token.special)
    assert whole.generated_text == QUESTION + shown
    assert events[-1].details.generated_tokens == len(events) and events[-1].details.input_length == 9


def test_the_older_path_returns_a_list_with_the_best_of_several(server: Running) -> None:
    [found] = answer(server, "/", best_of=3, temperature=1.5, seed=3, details=True, max_new_tokens=4)
    details = found["details"]

    def mean(one: dict[str, Any]) -> float:
        return float(sum(token["logprob"] for token in one["tokens"]) / len(one["tokens"]))

    assert len(details["best_of_sequences"]) == 2 and details["seed"] == 3
    assert all(mean(details) >= mean(one) for one in details["best_of_sequences"])
    stream = server.post("/", inputs=QUESTION, stream=True, parameters={"max_new_tokens": 2}).text
    assert [json.loads(one[5:])["index"] for one in stream.split("\n\n") if one] == [1, 2]


def test_a_stop_text_stays_and_details_are_complete(server: Running) -> None:
    found = answer(server, stop=["il"], details=True, top_n_tokens=2, decoder_input_details=True)
    details = found["details"]
    assert found["generated_text"].endswith("il") and details["finish_reason"] == "stop_sequence"
    assert [len(one) for one in details["top_tokens"]] == [2] * details["generated_tokens"]
    assert [one["logprob"] is None for one in details["prefill"]] == [True] + [False] * 8


def test_adapters_act_together_and_bind_nothing_else(server: Running) -> None:
    merged = {"ids": ["chinese", "japanese"], "weights": [1.0, 0.5], "density": 0.0}
    body = {"prompt": QUESTION, "temperature": 0, "max_tokens": 8}
    lora = [{"name": "chinese", "scale": 1.0}, {"name": "japanese", "scale": 0.5}]
    usual = server.post(**body, lora=lora).json()["choices"][0]["text"]
    assert answer(server, merged_adapters=merged, max_new_tokens=8) == {"generated_text": usual}
    base = server.post(**body).json()["choices"][0]["text"]
    assert answer(server, adapter_id="__base_model__")["generated_text"] == base
    assert answer(server, adapter_id="chinese+japanese")["generated_text"]
    chinese = answer(server, adapter_id="chinese")
    assert answer(server, adapter_id="chinese", adapter_source="local") == chinese


def test_grammars_of_both(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    for given in (
        {"grammar": {"type": "json", "value": schema}},
        {"grammar": {"type": "json_schema", "value": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "json_object", "schema": schema}},
    ):
        assert answer(server, **given)["generated_text"] == '{"a":1}'
    found = answer(server, grammar={"type": "regex", "value": "[0-9]{3}"}, details=True)
    assert found["generated_text"].isdigit() and found["details"]["finish_reason"] == "eos_token"


def test_chats_of_its_clients(server: Running, client: InferenceClient) -> None:
    """They name no model, and send formats and the name of a tool in their own form."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    chat: Any = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16, "temperature": 0}

    def content(**more: Any) -> Any:
        return client.chat_completion(**chat, **more).choices[0].message.content

    assert content() == content(model="demo") != content(model="chinese")
    for given in (
        {"type": "json", "value": schema},
        {"type": "json_object", "value": schema},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
        {"type": "json_object", "schema": schema},  # llama.cpp's
    ):
        assert content(response_format=given) == '{"a":1}', given
    assert content(response_format={"type": "regex", "value": "[0-9]{3}"}).isdigit()
    tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
    asked = {**chat, "model": "tgi", "tools": [tool], "tool_choice": "a"}
    [call] = server.ask("/v1/chat/completions", **asked)["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "a", "arguments": '{"a":1}'}
    wrong = {"type": "json_object", "value": schema, "schema": schema}
    refused = server.post("/v1/chat/completions", **chat, response_format=wrong)
    assert refused.status_code == 400 and "response_format." in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parameters", "status", "kind", "hint"),
    [
        ({"typical_p": 0}, 422, "validation", MORE + "typical_p"),
        ({"api_token": "x", "adapter_id": "chinese"}, 422, "validation", MORE + "api_token"),
        ({"max_new_tokens": 0}, 422, "validation", MORE + "max_new_tokens"),
        ({"max_new_tokens": 10**6}, 422, "validation", "maximum context length"),
        ({"best_of": 2}, 422, "validation", "needs sampling"),
        ({"adapter_id": "nobody"}, 404, "adapter_not_found", MORE + "adapter_id 'nobody' does not exist"),
        ({"adapter_id": "a", "adapter_source": "pbase"}, 422, "validation", MORE + "adapter_source"),
        ({"adapter_id": "/etc", "adapter_source": "local"}, 404, "adapter_not_found", MORE + "adapter_id"),
        (
            {"merged_adapters": {"ids": ["chinese"], "weights": [1.0], "merge_strategy": "ties"}},
            422, "validation", "should be 'linear'",
        ),
        ({"grammar": {"type": "regex", "value": "("}}, 422, "validation", MORE + "grammar"),
    ],
)  # fmt: skip
def test_errors_have_its_form(
    server: Running, parameters: dict[str, Any], status: int, kind: str, hint: str
) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        found = server.post(path, inputs=QUESTION, parameters=parameters)
        assert (found.status_code, found.json()["error_type"]) == (status, kind), found.text
        assert hint in found.json()["error"]


def test_its_client_raises_its_errors(client: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="watermark"):
        client.text_generation(QUESTION, watermark=True)


def test_null_is_the_rest_of_the_context_as_in_lorax(server: Running) -> None:
    found = answer(server, max_new_tokens=None, ignore_eos_token=True, details=True, adapter_id="chinese")
    most = server.http.get("/info").json()["max_total_tokens"]
    assert found["details"]["prompt_tokens"] + found["details"]["generated_tokens"] == most
    assert answer(server, ignore_eos_token=True, details=True)["details"]["generated_tokens"] == 100


def test_the_client_of_lorax(server: Running) -> None:
    lorax = pytest.importorskip("lorax", reason="pip install lorax-client")
    made = lorax.Client(server.url)
    found = made.generate(QUESTION, adapter_id="chinese", max_new_tokens=6)
    events = list(made.generate_stream(QUESTION, adapter_id="chinese", max_new_tokens=6))
    assert events[-1].generated_text == found.generated_text
    assert found.details.prompt_tokens == events[-1].details.prompt_tokens == 9
    with pytest.raises(lorax.errors.NotFoundError, match="'nobody' does not exist"):
        made.generate(QUESTION, adapter_id="nobody")
