"""Protects the APIs of Ollama, TGI, LoRAX and Tinker, with their own clients: bodies, streams,
ends, names of adapters, and errors in the form of each."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError
from serving import QUESTION, WEATHER, Running

from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.ollama_request import OllamaChat, OllamaGenerate
from manylora.doors.http.api.ollama_request import chat_request as chat_of_ollama
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
    found = chat_of_ollama(parse(raw, OllamaChat), "m")
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


def test_a_stream_of_ollama_that_fails_ends_with_the_reason() -> None:
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
    found = chat_of_ollama(parse(raw, OllamaGenerate), "m")
    assert found.seed is None and found.response_format is None
    with pytest.raises(ApiError, match="repeat_last_n"):
        options = {"repeat_penalty": 1.1, "repeat_last_n": 64}
        body = {"model": "m", "prompt": "a", "options": options}
        chat_of_ollama(parse(json.dumps(body).encode(), OllamaGenerate), "m")


TEXT = "What is the capital of France?"
MORE = "parameters."


@pytest.fixture(scope="module")
def hub(server: Running) -> InferenceClient:
    return InferenceClient(base_url=server.url)


def answer(server: Running, path: str = "/generate", **parameters: Any) -> Any:
    return server.ask(path, inputs=TEXT, parameters=parameters)


def test_an_adapter_answers_as_by_its_completion(server: Running, hub: InferenceClient) -> None:
    usual = server.post(model="chinese", prompt=TEXT, temperature=0, max_tokens=8, logprobs=0).json()
    choice = usual["choices"][0]
    assert hub.text_generation(TEXT, adapter_id="chinese", max_new_tokens=8) == choice["text"]
    found = hub.text_generation(TEXT, adapter_id="chinese", max_new_tokens=8, details=True)
    details = found.details
    assert details.finish_reason == "eos_token" and details.seed is None
    assert [one.text for one in details.tokens] == [*choice["logprobs"]["tokens"], "</s>"]
    shown = [one.logprob for one in details.tokens[:-1]]
    assert shown == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert details.generated_tokens == len(details.tokens) and details.tokens[-1].special


def test_a_stream_has_an_event_per_token_and_ends_with_the_whole(hub: InferenceClient) -> None:
    given: Any = {"adapter_id": "japanese", "max_new_tokens": 6, "return_full_text": True, "details": True}
    whole = hub.text_generation(TEXT, **given)
    events = list(hub.text_generation(TEXT, **given, stream=True))
    assert [one.token.id for one in events] == [one.id for one in whole.details.tokens]
    assert [one.index for one in events] == list(range(1, len(events) + 1))
    assert [one.generated_text for one in events] == [None] * (len(events) - 1) + [whole.generated_text]
    shown = "".join(one.token.text for one in events if not one.token.special)
    assert whole.generated_text == TEXT + shown
    assert events[-1].details.generated_tokens == len(events) and events[-1].details.input_length == 9


def test_the_older_path_returns_a_list_with_the_best_of_several(server: Running) -> None:
    [found] = answer(server, "/", best_of=3, temperature=1.5, seed=3, details=True, max_new_tokens=4)
    details = found["details"]

    def mean(one: dict[str, Any]) -> float:
        return float(sum(token["logprob"] for token in one["tokens"]) / len(one["tokens"]))

    assert len(details["best_of_sequences"]) == 2 and details["seed"] == 3
    assert all(mean(details) >= mean(one) for one in details["best_of_sequences"])
    stream = server.post("/", inputs=TEXT, stream=True, parameters={"max_new_tokens": 2}).text
    assert [json.loads(one[5:])["index"] for one in stream.split("\n\n") if one] == [1, 2]


def test_a_stop_text_stays_and_details_are_complete(server: Running) -> None:
    found = answer(server, stop=["il"], details=True, top_n_tokens=2, decoder_input_details=True)
    details = found["details"]
    assert found["generated_text"].endswith("il") and details["finish_reason"] == "stop_sequence"
    assert [len(one) for one in details["top_tokens"]] == [2] * details["generated_tokens"]
    assert [one["logprob"] is None for one in details["prefill"]] == [True] + [False] * 8


def test_adapters_act_together_and_bind_nothing_else(server: Running) -> None:
    merged = {"ids": ["chinese", "japanese"], "weights": [1.0, 0.5], "density": 0.0}
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 8}
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


def test_chats_of_its_clients(server: Running, hub: InferenceClient) -> None:
    """They name no model, and send formats and the name of a tool in their own form."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    chat: Any = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 16, "temperature": 0}

    def content(**more: Any) -> Any:
        return hub.chat_completion(**chat, **more).choices[0].message.content

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
        found = server.post(path, inputs=TEXT, parameters=parameters)
        assert (found.status_code, found.json()["error_type"]) == (status, kind), found.text
        assert hint in found.json()["error"]


def test_its_client_raises_its_errors(hub: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="watermark"):
        hub.text_generation(TEXT, watermark=True)


def test_null_is_the_rest_of_the_context_as_in_lorax(server: Running) -> None:
    found = answer(server, max_new_tokens=None, ignore_eos_token=True, details=True, adapter_id="chinese")
    most = server.http.get("/info").json()["max_total_tokens"]
    assert found["details"]["prompt_tokens"] + found["details"]["generated_tokens"] == most
    assert answer(server, ignore_eos_token=True, details=True)["details"]["generated_tokens"] == 100


def test_the_client_of_lorax(server: Running) -> None:
    lorax = pytest.importorskip("lorax", reason="pip install lorax-client")
    made = lorax.Client(server.url)
    found = made.generate(TEXT, adapter_id="chinese", max_new_tokens=6)
    events = list(made.generate_stream(TEXT, adapter_id="chinese", max_new_tokens=6))
    assert events[-1].generated_text == found.generated_text
    assert found.details.prompt_tokens == events[-1].details.prompt_tokens == 9
    with pytest.raises(lorax.errors.NotFoundError, match="'nobody' does not exist"):
        made.generate(TEXT, adapter_id="nobody")


IDS = [1, 331, 434, 297, 318, 316, 310, 1150, 36]
SDK = "pip install tinker"


def fields(data: bytes) -> dict[int, list[Any]]:
    """Of a protocol buffer: bytes, or a number."""
    found: dict[int, list[Any]] = {}
    (message := Empty()).ParseFromString(data)
    for one in UnknownFieldSet(message):
        found.setdefault(one.field_number, []).append(one.data)
    return found


def ask(server: Running, path: str, **body: Any) -> Any:
    answer = server.post(f"/api/v1/{path}", **body)
    assert answer.status_code == 200, answer.text
    return answer


def sample(server: Running, model: str, params: dict[str, Any], **more: Any) -> dict[int, list[Any]]:
    session = ask(server, "create_session", tags=[], sdk_version="0").json()["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "model_path": f"tinker://{model}"}
    sampler = ask(server, "create_sampling_session", **asked).json()["sampling_session_id"]
    assert server.http.get(f"/api/v1/samplers/{sampler}").json() == {
        "sampler_id": sampler, "base_model": "demo", "model_path": f"tinker://{model}",
    }  # fmt: skip
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS[:4]}, {"tokens": IDS[4:]}]}
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": params}
    begun = ask(server, "asample", **body, **more).json()
    assert len(begun["sample_sequence_ids"]) == more.get("num_samples", 1)
    found = ask(server, "retrieve_future", request_id=begun["request_id"])
    assert found.headers["content-type"] == "application/x-protobuf"
    return fields(found.content)


def test_a_sample_is_a_completion_with_its_end(server: Running) -> None:
    params = {"temperature": 0, "max_tokens": 8}
    usual = server.post(model="chinese", prompt=IDS, **params, logprobs=0, return_token_ids=True).json()
    choice = usual["choices"][0]
    [sequence] = sample(server, "chinese", params, topk_sample_logprobs=2)[1]
    found = fields(sequence)
    tokens, values = np.frombuffer(found[2][0], "<i4"), np.frombuffer(found[3][0], "<f4")
    assert tokens.tolist() == [*choice["token_ids"], 2] and found[1] == [0], "the end token is part of it"
    assert values[:-1] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    top = fields(found[4][0])
    assert (top[3], top[4]) == ([2], [len(tokens)])
    assert np.frombuffer(top[1][0], "<i4").reshape(-1, 2)[:, 0].tolist() == tokens.tolist()


def test_prompts_are_scored_and_nothing_ends_an_output_without_stop(server: Running) -> None:
    asked = {"prompt": IDS, "echo": True, "logprobs": 0, "max_tokens": 0}
    usual = server.post(model="japanese", **asked).json()["choices"][0]["logprobs"]["token_logprobs"]
    params = {"max_tokens": 12, "stop": [], "seed": 5}
    found = sample(server, "japanese", params, num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=1)
    values = np.frombuffer(found[2][0], "<f4")
    assert np.isnan(values[0]) and values[1:] == pytest.approx(usual[1:], abs=1e-4)
    assert len(np.frombuffer(fields(found[3][0])[2][0], "<f4")) == len(IDS)
    sequences = [fields(one) for one in found[1]]
    assert [one[1] for one in sequences] == [[1], [1]], "the length ended both"
    assert [len(one[2][0]) for one in sequences] == [48, 48]
    last = sample(server, "japanese", params, prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert np.isnan(np.frombuffer(last[2][0], "<f4")).tolist() == [True] * 7 + [False] * 2


@pytest.mark.parametrize(
    ("path", "body", "status", "hint"),
    [
        ("create_model", {"base_model": "demo"}, 400, "this server samples"),
        ("create_sampling_session", {"model_path": "tinker://x"}, 404, "'x' does not exist"),
        ("create_sampling_session", {}, 400, "model_path or base_model"),
        ("asample", {"base_model": "demo", "sampling_params": {"max_tokens": 10**6}}, 400, "context length"),
        ("asample", {"base_model": "demo", "sampling_params": {}, "prompt_alt_tokens_k": 1}, 400, "alt_t"),
        ("asample", {"base_model": "demo", "sampling_params": {"x": 1}}, 400, "sampling_params.x"),
        ("retrieve_future", {"request_id": "gone"}, 410, "sample again"),
    ],
)  # fmt: skip
def test_what_tinker_has_and_this_server_has_not(
    server: Running, path: str, body: dict[str, Any], status: int, hint: str
) -> None:
    if path == "create_sampling_session":
        body = {"session_id": "s", "sampling_session_seq_id": 0, **body}
    if path == "asample":
        body = {"prompt": {"chunks": [{"tokens": IDS}]}, **body}
    assert hint in server.ask(f"/api/v1/{path}", status, **body)["error"]


def test_the_client_of_tinker(server: Running) -> None:
    tinker = pytest.importorskip("tinker", reason=SDK)
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-none")
    client = service.create_sampling_client(model_path="tinker://chinese").result()
    prompt, params = tinker.ModelInput.from_ints(IDS), tinker.SamplingParams(max_tokens=8, temperature=0)
    found = client.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    assert found.sequences[0].tokens[-1] == 2 and found.sequences[0].stop_reason == "stop"
    assert client.compute_logprobs(prompt).result()[0] is None
    with pytest.raises(tinker.APIStatusError, match="'nobody' does not exist"):
        service.create_sampling_client(model_path="tinker://nobody").result()
