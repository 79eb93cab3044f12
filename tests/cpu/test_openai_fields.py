"""Protects the fields that tools send: of OpenAI, vLLM and SGLang. What is taken acts, or cannot change an
answer; the rest is refused by name."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from serving import CITY, DEMO, QUESTION, Running

from manylora.generation.tokenizer import Tokenizer

LINE = "What is the capital of France?\nAnswer:"
CHAT = "/v1/chat/completions"
WORDS = ("yes", "no (really)")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(lora_root=(DEMO / "adapters",), log_level="debug") as running:
        yield running


def chat(server: Running, **body: Any) -> dict[str, Any]:
    return server.ask(CHAT, **{"model": "demo", "messages": QUESTION, "temperature": 0, **body})


def complete(server: Running, **body: Any) -> dict[str, Any]:
    return server.ask(**{"model": "demo", "prompt": LINE, "temperature": 0, **body})


def refused(server: Running, path: str, **body: Any) -> dict[str, Any]:
    given = {"prompt": LINE} if path == "/v1/completions" else {"messages": QUESTION}
    return server.ask(path, 400, **{"model": "demo", **given, **body})["error"]


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


NEUTRAL = {
    "metadata": {"run": "7"},
    "store": True,
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "service_tier": "flex",
    "user": "me",
    "guided_decoding_backend": "xgrammar",
    "priority": 0,
}
NEUTRAL_IN_CHATS = {"verbosity": "low", "prediction": {"type": "content", "content": "Paris"}}


def test_fields_that_cannot_change_an_answer_do_not(server: Running) -> None:
    plain = chat(server)["choices"]
    assert chat(server, **NEUTRAL, **NEUTRAL_IN_CHATS, reasoning_effort="low")["choices"] == plain
    assert complete(server, **NEUTRAL)["choices"] == complete(server)["choices"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {str(i): "a" for i in range(17)}),
        ("request_id", "a b"),
        ("priority", 1),
        ("prompt_logprobs", 21),
        ("allowed_token_ids", [1536]),
        ("cache_salt", ""),
        ("structured_outputs", {"structural_tag": "{}", "regex": "a"}),
        ("guided_json", "{"),
    ],
)
def test_what_is_wrong_is_refused_by_name(server: Running, field: str, value: Any) -> None:
    for path in ("/v1/completions", CHAT):
        error = refused(server, path, **{field: value})
        assert field in error["message"] and error["param"].startswith(field)


def test_too_many_stop_texts_are_told_as_too_many(server: Running) -> None:
    """And not as no string, which is the other thing that `stop` may be."""
    for path in ("/v1/completions", CHAT):
        assert "at most 16 items" in refused(server, path, stop=["a"] * 17)["message"]


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("lora_name", "chinese", "name the adapter in model, lora_model or lora_request"),
        ("use_beam_search", True, "beam search is available in Python (LLM) and from Triton (beam_width)"),
        ("no_such_field", 1, "leave it out"),
    ],
)
def test_a_field_of_another_server_is_refused_with_what_to_use(
    server: Running, field: str, value: Any, instead: str
) -> None:
    for path in ("/v1/completions", CHAT):
        assert refused(server, path, **{field: value})["message"] == f"{field} is not supported: {instead}"


def test_the_base_model_is_also_called_by_the_path_it_was_started_with(server: Running) -> None:
    for path in (str(DEMO / "base"), f"{DEMO / 'base'}/"):
        answer = server.post(model=path, prompt=LINE, max_tokens=4, temperature=0).json()
        assert (answer["model"], answer["system_fingerprint"]) == (path, "fp_demo")
    other = server.post(model="/models/llama", prompt=LINE)
    assert other.status_code == 400
    assert "GET /v1/models lists the names" in other.json()["error"]["message"]
    listed = server.http.get("/v1/models").json()["data"]
    assert not any("/" in one["id"] for one in listed)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("guided_json", {"guided_json": {}, "structured_outputs": {"regex": "a"}}),
    ],
)
def test_fields_that_exclude_each_other_are_named(server: Running, field: str, body: Any) -> None:
    assert field in refused(server, "/v1/completions", **body)["message"]


def test_usage_comes_with_every_chunk_where_it_is_asked_for(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, prompt in (("/v1/completions", {"prompt": LINE}), (CHAT, {"messages": QUESTION})):
        body = {"model": "demo", "temperature": 0, "stream": True, **prompt}
        chunks = events(server.post(path, **body, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == counts[-2] > 0
        assert all(chunk["usage"]["prompt_tokens"] > 5 for chunk in chunks)
        plain = events(server.post(path, **body, stream_options={"continuous_usage_stats": False}))
        assert not any("usage" in chunk for chunk in plain)


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"regex": "yes|no"}},
        {"structured_outputs": {"choice": list(WORDS)}},
        {"structured_outputs": {"grammar": 'root ::= "yes" | "no"', "json": None}},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"guided_regex": "yes|no"},
        {"guided_regex": "yes|no", "structured_outputs": {"regex": "yes|no"}},  # guidance sends both
        {"guided_choice": list(WORDS)},
        {"guided_grammar": 'root ::= "yes" | "no"'},
        {"regex": "yes|no"},
        {"ebnf": 'root ::= "yes" | "no"'},
    ],
)
def test_a_guide_of_vllm_or_sglang_binds_the_answer(server: Running, body: Any) -> None:
    assert complete(server, **body)["choices"][0]["text"] in ("yes", "no", "no (really)")
    assert chat(server, **body)["choices"][0]["message"]["content"] in ("yes", "no", "no (really)")


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"json": CITY}},
        {"structured_outputs": {"json": json.dumps(CITY)}},
        {"guided_json": CITY},
        {"json_schema": json.dumps(CITY)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}},
    ],
)
def test_json_is_compact_and_closed(server: Running, body: Any) -> None:
    for seed in range(3):
        text = complete(server, **body, temperature=1.5, seed=seed, max_tokens=40)["choices"][0]["text"]
        assert text in ('{"city":"Rome"}', '{"city":"Oslo"}')


def test_a_schema_chooses_its_own_white_space(server: Running) -> None:
    spaced = {**CITY, "x-guidance": {"whitespace_flexible": False, "key_separator": ": "}}
    wanted = {"type": "json_schema", "json_schema": {"name": "c", "schema": spaced}}
    text = complete(server, response_format=wanted, max_tokens=40)["choices"][0]["text"]
    assert text in ('{"city": "Rome"}', '{"city": "Oslo"}')
    for body in (
        {"guided_json": CITY, "guided_whitespace_pattern": "_"},
        {"structured_outputs": {"json": CITY, "whitespace_pattern": "_"}},
    ):
        text = complete(server, **body, max_tokens=40)["choices"][0]["text"]
        assert json.loads(text.replace("_", "")) in ({"city": "Rome"}, {"city": "Oslo"})
    loose = {"structured_outputs": {"json": CITY, "disable_any_whitespace": False}}
    assert json.loads(complete(server, **loose, max_tokens=200)["choices"][0]["text"])["city"]


NOTHING = {"type": "nothing"}
A_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": NOTHING}}}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"enum": ["a" * 2**18]}}, "guided_json"),
        ({"json_schema": json.dumps(NOTHING)}, "json_schema"),
        ({"ebnf": "root ::= nothing"}, "ebnf"),
        ({"structured_outputs": {"json": NOTHING}}, "structured_outputs"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        ({"tools": [A_TOOL], "tool_choice": "required"}, "tools"),
    ],
)
def test_a_wrong_guide_is_refused_under_the_name_of_its_field(
    server: Running, body: dict[str, Any], field: str
) -> None:
    for path in [CHAT] if "tools" in body else [CHAT, "/v1/completions"]:
        for stream in (False, True):
            error = refused(server, path, **body, stream=stream)
            assert (error["code"], error["param"]) == ("invalid_response_format", field)
            assert error["message"].startswith(f"{field} ")


def test_other_apis_name_a_wrong_guide_by_their_own_fields(server: Running) -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": NOTHING}}
    wrong = server.post("/v1/responses", model="demo", input="a", text=text).json()["error"]
    assert wrong["param"] == "text.format" and wrong["message"].startswith("text.format is not a valid")
    chat = server.post("/api/chat", model="demo", messages=QUESTION, format=NOTHING)
    assert chat.status_code == 400 and chat.json()["error"].startswith("format is not a valid")


@pytest.mark.parametrize(("kind", "most"), [("integer", 20), ("number", 26)])
def test_a_number_ends(server: Running, kind: str, most: int) -> None:
    """Also where the model would go on: the bias forbids everything but digits and the point."""
    tokenizer = Tokenizer(DEMO / "base")
    digits = {i: 100 for token, i in tokenizer.vocabulary().items() if set(token) <= set("0123456789.")}
    body = complete(server, guided_json={"type": kind}, logit_bias=digits, max_tokens=64)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop" and 0 < len(choice["text"]) <= most


def test_log_probabilities_of_a_prompt_are_those_of_its_echo(server: Running) -> None:
    body = {"max_tokens": 1, "prompt_logprobs": 2}
    [choice] = complete(server, **body, logprobs=2, echo=True)["choices"]
    entries, echoed = choice["prompt_logprobs"], choice["logprobs"]
    assert entries[0] is None and len(entries) == len(echoed["tokens"]) - 1
    for entry, token, value in zip(
        entries[1:], echoed["tokens"][1:], echoed["token_logprobs"][1:], strict=False
    ):
        own = next(iter(entry.values()))
        assert own["decoded_token"] == token and math.isclose(own["logprob"], value, abs_tol=1e-5)
        ranks = [one["rank"] for one in entry.values()]
        assert {1, 2} <= set(ranks) and len(entry) in (2, 3)
        assert all(
            one["logprob"] <= max(o["logprob"] for o in entry.values() if o["rank"] == 1)
            for one in entry.values()
        )
    assert len(chat(server, **body)["prompt_logprobs"]) == chat(server)["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in complete(server)["choices"][0]


@pytest.mark.parametrize("prompt", [LINE, "日本 é <s> a", "华"])
def test_an_echo_tells_where_its_tokens_begin(server: Running, prompt: str) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 4, "ignore_eos": True}
    [choice] = complete(server, **body)["choices"]
    text, found = choice["text"], choice["logprobs"]
    assert text.startswith(prompt) and found["text_offset"][:2] == [0, 0]  # the first is the <s> before it
    shown = zip(found["tokens"][1:], found["text_offset"][1:], strict=True)
    whole = [(token, at) for token, at in shown if "\ufffd" not in token and token != "</s>"]
    assert len(whole) > 3 and all(text.startswith(token, at) for token, at in whole)
    chunks = events(server.post(model="demo", temperature=0, **body, stream=True))
    streamed = [
        at for c in chunks for at in (c["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    assert streamed == found["text_offset"]


def test_token_ids_are_returned_whole_and_in_streams(server: Running) -> None:
    tokenizer = Tokenizer(DEMO / "base")
    [choice] = complete(server, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == tokenizer.encode(LINE)
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    chunks = events(server.post(model="demo", prompt=LINE, temperature=0, return_token_ids=True, stream=True))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == choice["token_ids"]
    whole = chat(server, return_token_ids=True)
    body = {"model": "demo", "messages": QUESTION, "temperature": 0}
    chunks = events(server.post(CHAT, **body, return_token_ids=True, stream=True))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [i for c in chunks for i in c["choices"][0].get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]


def test_an_answer_has_the_id_that_was_asked_for(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    assert complete(server, request_id="mine")["id"] == "cmpl-mine"
    assert chat(server, request_id="mine")["id"] == "chatcmpl-mine"
    body = {"model": "demo", "prompt": LINE, "max_tokens": 1}
    with caplog.at_level(logging.DEBUG, "manylora"):
        answer = server.http.post("/v1/completions", json=body, headers={"x-request-id": "trace:7"})
    assert answer.headers["x-request-id"] == "trace:7" and answer.json()["id"] == "cmpl-trace:7"
    assert any("request trace:7" in record.getMessage() for record in caplog.records)
    stream = server.http.post("/v1/completions", json={**body, "stream": True}, headers={"x-request-id": "s"})
    assert stream.headers["x-request-id"] == "s"
    for path, unsafe in (
        ("/v1/models", "a b"),
        ("/v1/models", "x" * 129),
        ("/nowhere", ""),
        ("/health", "é"),
    ):
        made = server.http.get(path, headers={"x-request-id": unsafe.encode()}).headers["x-request-id"]
        assert len(made) == 32 and made != unsafe


def test_prompts_are_reused_among_equal_salts_only(server: Running) -> None:
    def reused(salt: str | None) -> float:
        name = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="reused"'
        before = server.metric(name)
        complete(server, prompt="a b c d e f g h " * 12, cache_salt=salt, max_tokens=1)
        complete(server, prompt="z", max_tokens=1)  # figures of a step may be later than its answer
        return server.metric(name) - before

    salts = (None, None, "a", "a", "b", "a")
    assert [reused(salt) > 0 for salt in salts] == [False, True, False, True, False, True]


def test_a_template_sees_its_variables(server: Running, tmp_path: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if thinking is defined %}[{{ thinking }}]{% endif %}"
        "{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        encoding="utf-8",
    )
    with Running(chat_template=template) as own:

        def shown(**body: Any) -> str:
            return chat(own, max_tokens=1, return_expanded_prompt=True, **body)["expanded_prompt"]

        user = "<s><|user|>What is the capital of France?"
        assert shown() == f"{user}<|assistant|>"
        assert shown(add_generation_prompt=False) == user
        assert shown(chat_template_kwargs={"thinking": 3}) == f"{user}[3]<|assistant|>"
        assert shown(reasoning_effort="high") == f"{user}(high)<|assistant|>"
        messages = [*QUESTION, {"role": "assistant", "content": " Par "}]
        assert shown(messages=messages, continue_final_message=True) == f"{user}<|assistant|>Par"
        for body in (
            {"continue_final_message": True, "add_generation_prompt": True},
            {"continue_final_message": True, "messages": [{"role": "user", "content": " "}]},
            {"chat_template_kwargs": {"messages": []}},
            {"chat_template_kwargs": {"a": "x" * 70000}},
            {"chat_template_kwargs": {str(i): 1 for i in range(65)}},
        ):
            assert refused(own, CHAT, **body)["code"] == "invalid_value"
        tokens = own.post("/tokenize", messages=messages, continue_final_message=True).json()["tokens"]
        assert Tokenizer(DEMO / "base").decode(tokens, False) == f"{user}<|assistant|>Par"
