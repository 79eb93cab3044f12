"""Protects chats: templates, tools, grammars that bind the answer, and their streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import CITY, QUESTION, WEATHER, Running

from manylora.doors.http.api.errors import ApiError
from manylora.doors.http.api.parsing import parse
from manylora.doors.http.api.schema import ChatRequest
from manylora.doors.http.api.tools import ToolUse, tool_use
from manylora.errors import ConfigError, RequestError
from manylora.generation.chat_template import ChatTemplate

TIME = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


def use(**fields: Any) -> ToolUse:
    body = parse(json.dumps({"messages": QUESTION, "tools": [WEATHER, TIME], **fields}).encode(), ChatRequest)
    found = tool_use(body)
    assert found is not None
    return found


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_cut_off_comes_as_far_as_it_is(server: Running, choice: Any) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0}
    body |= {"tools": [WEATHER], "tool_choice": choice}
    client = server.client()
    full = client.chat.completions.create(**body)
    [call] = full.choices[0].message.tool_calls
    partial = False
    for count in (1, full.usage.completion_tokens // 2, full.usage.completion_tokens - 2):
        [whole] = client.chat.completions.create(**body, max_tokens=count).choices
        assert (whole.finish_reason, whole.message.content) == ("length", None)
        told = whole.message.tool_calls or []
        whole_call = call.function.arguments.replace(" ", "")
        assert all(whole_call.startswith(one.function.arguments.replace(" ", "")) for one in told)
        partial = partial or bool(told)
        chunks = [c.choices[0] for c in client.chat.completions.create(**body, max_tokens=count, stream=True)]
        assert chunks[-1].finish_reason == "length" and not any(chunk.delta.content for chunk in chunks)
        streamed = [one.function.arguments for chunk in chunks for one in chunk.delta.tool_calls or []]
        assert "".join(streamed) == "".join(one.function.arguments for one in told)
    assert partial


def test_an_answer_is_a_call_or_in_the_format(server: Running) -> None:
    schema = {**CITY, "properties": {"city": {"enum": ["Lima"]}}}
    json_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    body: dict[str, Any] = {"model": "demo", "messages": QUESTION, "tools": [WEATHER], "temperature": 2}
    found = set()
    for seed in range(6):
        answer = server.post("/v1/chat/completions", **body, seed=seed, response_format=json_format)
        message = answer.json()["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        found.add(message["content"] or calls[0]["function"]["arguments"].replace(" ", ""))
    assert found <= {'{"city":"Lima"}', '{"city":"Rome"}', '{"city":"Oslo"}'} and len(found) > 1


def test_only_allowed_tools_are_called(server: Running) -> None:
    named = [{"type": "function", "function": {"name": "clock"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    body: dict[str, Any] = {"model": "demo", "messages": QUESTION, "tools": [WEATHER, TIME]}
    for seed in range(3):
        [found] = server.client().chat.completions.create(**body, seed=seed, tool_choice=choice).choices
        assert [call.function.name for call in found.message.tool_calls] == ["clock"]
    assert use(tool_choice={**choice, "allowed_tools": {"mode": "auto", "tools": named}}).names == {"clock"}
    named[0]["function"]["name"] = "fly"
    refused = server.post("/v1/chat/completions", **body, tool_choice=choice)
    assert refused.status_code == 400 and "no tool 'fly'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "no tool 'fly'"),
        ({"tools": [WEATHER, WEATHER]}, "same name"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        use(**fields)


def test_a_conversation_with_calls_goes_on(server: Running) -> None:
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]
    answer = server.post("/v1/chat/completions", model="demo", messages=messages, max_tokens=4)
    assert answer.status_code == 200, answer.text
    bad = [{"role": "assistant", "tool_calls": [{**call, "function": {"name": "x", "arguments": "["}}]}]
    for wrong in (bad, [{"role": "user"}], [{"role": "user", "content": "a", "tool_calls": [call]}]):
        refused = server.post("/v1/chat/completions", model="demo", messages=wrong)
        assert refused.status_code == 400 and "messages" in refused.json()["error"]["message"]


def template(tmp_path: Path, text: str) -> ChatTemplate:
    return ChatTemplate.read(tmp_path, {"chat_template": text, "bos_token": {"content": "<s>"}})


def test_templates_see_what_transformers_shows_them(tmp_path: Path) -> None:
    made = template(
        tmp_path,
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content | tojson }}{% endfor %}{{ tools | tojson }}{{ strftime_now('%Y') | length }}",
    )
    assert made.takes_tools
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "b"}]
    assert made.render(messages, [{"a": 1}]) == '<s>"<é>"[{"a": 1}]4'
    refusing = template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        refusing.render(messages)
    with pytest.raises(RequestError, match="TypeError"):
        template(tmp_path, "{{ messages + 1 }}").render(messages)
    with pytest.raises(ConfigError, match="not valid"):
        template(tmp_path, "{% for %}")
    (tmp_path / "chat_template.jinja").write_text("from a file", encoding="utf-8")
    assert template(tmp_path, "x").render(messages) == "from a file"


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_without_tools_gets_them_and_earlier_calls_as_text() -> None:
    """The calls are in the form that the instructions teach, which the parser reads."""
    calls = [{"id": str(i), "type": "function", "function": json.loads(CALL)} for i in range(2)]
    chat = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": calls[:1]},
        {"role": "tool", "tool_call_id": "0", "content": "sunny"},
        {"role": "assistant", "content": "Both.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "1"},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    made = ChatTemplate({"default": CHATML}, {})
    text = made.render(chat, [WEATHER])
    system, user, first, result, second, both, _ = text.removeprefix("<|").split("<|")[0:7]
    assert system.startswith("system|>Be brief.") and '"name": "weather"' in system
    assert (user, result) == (f"user|>{QUESTION[0]['content']}", "user|>Result of weather: sunny")
    assert first == f"assistant|>{CALL}" and second == f"assistant|>Both.\n[{CALL}, {CALL}]"
    assert both == "user|>Result of weather: 1\nResult of weather: 2"
    assert "Result of its name: …" in system and '{"name": its name' in system
    assert made.render(chat).endswith(text[text.index("<|user|>") :])  # calls stay where no tool is offered
    knowing = ChatTemplate({"default": CHATML.replace("m.content", "m.content ~ m.tool_calls")}, {})
    assert "Result of" not in knowing.render(chat) and "Result of" in knowing.render(chat, [WEATHER])


def test_tools_count_in_a_tokenised_chat(server: Running) -> None:
    body = {"model": "demo", "messages": QUESTION, "tools": [WEATHER]}
    chat = server.post("/v1/chat/completions", **body, max_tokens=1).json()
    told = server.post("/tokenize", **body).json()
    assert told["count"] == chat["usage"]["prompt_tokens"]
    assert told["count"] > server.post("/tokenize", model="demo", messages=QUESTION).json()["count"]
    assert server.post("/tokenize", model="demo", prompt="a", tools=[WEATHER]).status_code == 400
