"""Protects reasoning and tool calls in models' own formats: however an output is split, in each API, with the
clients of OpenAI and Anthropic, on a model whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import torch
from serving import Running
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

from manylora.generation.reply import ReplyFormat, ReplyReader
from manylora.generation.reply_formats import HARMONY, THINK, marks_of, thinking_of

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
TOOLS += [
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
]
WEATHER, CLOCK = ("weather", '{"city": "Rome\\n2", "days": 3}'), ("clock", "{}")
ARGUMENTS = '{"city":"Rome\\n2","days":3}'
JSON = [f'{{"name": "weather", "arguments": {ARGUMENTS}}}', '{"name": "clock", "arguments": {}}']
LLAMA = [one.replace("arguments", "parameters") for one in JSON]
COHERE = [one.replace('"name"', '"tool_call_id": "0", "tool_name"') for one in LLAMA]
PYTHON = "weather(city='Rome\\n2', days=3), clock()"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
CALLS = {
    "hermes": "".join(f"<tool_call>\n{one}\n</tool_call>\n" for one in JSON),
    "llama3_json": f"<|python_tag|>{'; '.join(LLAMA)}",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock[CALL_ID]a[ARGS]{{}}",
    "granite": f"<|tool_call|>[{', '.join(JSON)}]",
    "cohere_command3": f"<|START_ACTION|>[\n{', '.join(COHERE)}\n]<|END_ACTION|>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n2\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome\n2</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
    "deepseek_v3": f"{CALLS_BEGIN}{BEGIN}function{SEP}weather\n```json\n{ARGUMENTS}\n```{END}\n"
    f"{BEGIN}function{SEP}clock\n```json\n{{}}\n```{END}{CALLS_END}",
    "deepseek_v31": f"{CALLS_BEGIN}{BEGIN}weather{SEP}{ARGUMENTS}{END}{BEGIN}clock{SEP}{{}}{END}{CALLS_END}",
    "pythonic": f"[{PYTHON}]",
    "lfm2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "olmo3": f"<function_calls>\n{PYTHON.replace('), ', ')' + chr(10))}\n</function_calls>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Rome\n2<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:clock{}<tool_call|>",
    "nemotron_json": f"<TOOLCALL>[{', '.join(JSON)}]</TOOLCALL>",
}
BARE = f"\n [{', '.join(JSON)}]\n"  # of a template that shows no form
Reply = tuple[str, str, list[tuple[str, str]]]


def read(form: ReplyFormat, *pieces: str, cut: bool = False) -> Reply:
    """Reasoning, content and calls of an output that comes in these pieces. cut: it ends too early."""
    reader, texts, calls = ReplyReader(form), {"reasoning": "", "content": ""}, list[tuple[str, str]]()
    for text, final in (*((one, False) for one in pieces[:-1]), (pieces[-1], True)):
        for piece in reader.add(text, final, cut):
            if piece.kind == "name":
                assert piece.call == len(calls)
                calls.append((piece.text, ""))
            elif piece.kind == "arguments":
                calls[piece.call] = (calls[piece.call][0], calls[piece.call][1] + piece.text)
            else:
                texts[piece.kind] += piece.text
    return texts["reasoning"], texts["content"], calls


def check_splits(form: ReplyFormat, text: str, expected: Reply) -> None:
    """In two pieces at each character, and character by character."""
    for at in range(len(text) + 1):
        assert read(form, text[:at], text[at:], "") == expected, text[:at]
    assert read(form, *text) == expected


def form_of(parser: str = "auto", **more: Any) -> ReplyFormat:
    return ReplyFormat(THINK, False, {"weather": PARAMETERS, "clock": {}}, marks_of(parser, None), **more)


@pytest.mark.parametrize("parser", CALLS)
def test_calls_of_each_format_are_the_same_however_they_are_split(parser: str) -> None:
    text = f"<think>\nA </thin b\n</think>\n\n{CALLS[parser]}"
    check_splits(form_of(parser), text, ("A </thin b", "", [WEATHER, CLOCK]))
    assert read(form_of(parser, parallel=False), text)[2] == [WEATHER]
    early = [piece.text for piece in ReplyReader(form_of(parser)).add(text[: text.index("Rome") + 5])]
    assert early[1] == "weather" and ("Rom" in early[-1] or parser in ("pythonic", "lfm2", "olmo3", "gemma4"))
    if parser != "pythonic":
        check_splits(form_of(parser), f"Let me see.\n{CALLS[parser]}", ("", "Let me see.", [WEATHER, CLOCK]))


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "fly", "arguments": {}}</tool_call> <tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arg',
        "<tool_call></tool_call>[]",
        "[weather](x) and [1, 2]",
        '{"city": "Rome"}',
        "a <tool",
        " \n",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    check_splits(form_of(), text, ("", text, []))
    broken = '<tool_call>{"name": "weather", "arguments": {"days": Inf}}</tool_call>'
    assert read(form_of(), broken) == ("", broken, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (BARE, "", [WEATHER, CLOCK]),
        ('[{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
        ('{"name": "wea', "", []),
        ('{"name": "unknown", "arguments": {"a', '{"name": "unknown", "arguments": {"a', []),
        ('Well. <tool_call>{"name": "weather", "arguments": {"c', "Well.", [("weather", '{"c')]),
    ],
)
def test_a_call_that_is_cut_off_is_no_content(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    form = ReplyFormat(None, False, {"weather": PARAMETERS, "clock": {}}, marks_of("auto", None))
    for pieces in ((text,), (*text, "")):
        assert read(form, *pieces, cut=True) == ("", content, calls)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>{" * 9000 + "}" * 9000),
        ("hermes", '<tool_call>{"id": "' + "a" * 100_000),
        ("hermes", "<tool_call>" + "a" * 100_000),
        ("pythonic", "[weather(city='" + r"\'" * 50_000),
        ("glm45", "<tool_call>clock<arg_key>x</arg_key><arg_value>'" + r"\'" * 50_000 + "</arg_value>"),
        ("glm45", "<tool_call>clock<arg_key>x</arg_key><arg_value>" + "a" * 100_000 + "</arg_value>"),
        ("mistral", '[TOOL_CALLS]fly{"x": 1}'),
    ],
)
def test_long_texts_are_read_once(parser: str, text: str) -> None:
    """They take minutes if they are searched again with every token."""
    for step in (4, len(text)):
        found = read(form_of(parser), *(text[at : at + step] for at in range(0, len(text), step)), "")
        assert parser not in ("hermes", "mistral") or found == ("", text, [])


def test_channels_of_gpt_oss() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
    form = ReplyFormat(HARMONY, False, {"weather": PARAMETERS}, ())
    check_splits(form, f"{thought}final<|message|>It rains.", ("Hm.", "It rains.", []))
    call = f"commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    check_splits(form, thought + call, ("Hm.", "", [WEATHER]))
    check_splits(form, "Plain.", ("", "Plain.", []))


def test_the_template_says_how_a_model_thinks() -> None:
    assert thinking_of("auto", "{{ m }}<think>") is None
    assert thinking_of("auto", "{% if x %}</think>{% endif %}") is THINK
    assert thinking_of("auto", "<|channel|>final<|message|>{{ m }}<|end|>") is HARMONY
    assert marks_of("auto", "a <function=x> b <tool_call>") == ("<tool_call>", "<function=")


TEMPLATE = (
    "{# </think> <tool_call> #}{% if tools %}{% endif %}"
    "{{ '.' * (messages[0].content | int) }}{% if enable_thinking %}<think>{% endif %}"
    "{{ messages[-1].reasoning_content }}"
)
THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
ANALYSIS = "<|channel|>analysis<|message|>It may rain.<|end|><|start|>assistant<|channel|>"
SCRIPTS = {
    "rain": f"{THOUGHT}It rains.",
    "call": f"{THOUGHT}Look.\n{CALLS['hermes']}",
    "channels": f"{ANALYSIS}final<|message|>It rains.",
    "channel of a call": f"{ANALYSIS}commentary to=functions.clock<|message|>{{}}<|call|>",
}


def reciting(folder: Path) -> tuple[Path, dict[str, str]]:
    """A model that continues by position, and the message that leads to each of SCRIPTS: as many dots."""
    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(["</s>", *HARMONY.starts, *HARMONY.ends, *HARMONY.inner])
    words = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in words])
    starts, script = {}, [0]
    for name, text in SCRIPTS.items():
        starts[name] = str(len(script))
        script += [*tokenizer.encode(text).ids, 256]
    size = tokenizer.get_vocab_size()
    config = GPT2Config(
        vocab_size=size, n_positions=len(script) + 2, n_embd=len(script) + 2, n_layer=1, n_head=1, n_inner=8,
        bos_token_id=256, eos_token_id=256, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(torch.eye(len(script) + 2))
        model.transformer.ln_f.weight.fill_(1)
        for at, token in enumerate(script[1:]):
            model.lm_head.weight[token, at] = 1
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, starts


@pytest.fixture(scope="module")
def recited(workshop: Path) -> Iterator[tuple[Running, dict[str, Any]]]:
    folder, starts = reciting(workshop / "reciting")
    running = Running(model=folder, served_model_name=("demo",), dtype="float32")
    asked = {name: [{"role": "user", "content": start}] for name, start in starts.items()}
    yield running, asked
    running.close()


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_not_content(recited: tuple[Running, dict[str, Any]], opened: bool) -> None:
    server, asked = recited
    body: Any = {"model": "demo", "messages": asked["rain"], "temperature": 0}
    body["extra_body"] = {"chat_template_kwargs": {"enable_thinking": opened}}
    create = server.client().chat.completions.create
    whole = create(**body)
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == (
        "It rains.",
        *["It may rain."] * 2,
    )
    chunks = list(create(**body, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "It rains."
    thoughts = [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")]
    assert "".join(thoughts) == "It may rain."
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens_details.reasoning_tokens == 14 - opened  # with its start
    body["extra_body"]["include_reasoning"] = False
    assert create(**body).choices[0].message.model_dump(exclude_unset=True).keys() == {
        "role",
        "content",
        "refusal",
    }
    body["extra_body"]["separate_reasoning"] = False
    kept = create(**body).choices[0].message.content
    assert kept == SCRIPTS["rain"].removeprefix("<think>" * opened)
    cut = create(**body | {"max_tokens": 6, "extra_body": {}}).choices[0]
    assert (cut.finish_reason, cut.message.content, cut.message.reasoning) == ("length", None, "It m")
    stop = create(**body | {"stop": "may", "extra_body": {}}).choices[0]
    assert (stop.finish_reason, stop.message.reasoning) == ("stop", "It")


def test_calls_follow_reasoning_and_are_streamed(recited: tuple[Running, dict[str, Any]]) -> None:
    server, asked = recited
    body: Any = {"model": "demo", "messages": asked["call"], "temperature": 0, "tools": TOOLS}
    [whole] = server.client().chat.completions.create(**body).choices
    assert (whole.finish_reason, whole.message.content, whole.message.reasoning) == (
        "tool_calls",
        "Look.",
        "It may rain.",
    )
    assert [(one.function.name, one.function.arguments) for one in whole.message.tool_calls] == [
        WEATHER,
        CLOCK,
    ]
    with server.client().chat.completions.stream(**body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and final.finish_reason == "tool_calls"
    assert [one.function.arguments for one in final.message.tool_calls] == [WEATHER[1], CLOCK[1]]
    echo = [*asked["call"], whole.message.model_dump(exclude_unset=True)]
    answered = server.post("/v1/chat/completions", model="demo", messages=echo, max_tokens=1)
    assert answered.json()["usage"]["prompt_tokens"] == int(asked["call"][0]["content"]) + len("It may rain.")


@pytest.mark.parametrize("opened", [False, True])
def test_guides_bind_what_follows_the_reasoning(
    recited: tuple[Running, dict[str, Any]], opened: bool
) -> None:
    server, asked = recited
    body: Any = {"model": "demo", "messages": asked["rain"], "temperature": 0}
    body["chat_template_kwargs"] = {"enable_thinking": opened}
    formats = [
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["It/s"]}}},
        {"type": "regex", "regex": '"It/s"'},
        {"type": "ebnf", "ebnf": 'root ::= "\\"It/s\\""'},
        {"type": "lark_grammar", "lark_grammar": 'start: "\\"It/s\\""'},
    ]
    for one in formats:
        message = server.post("/v1/chat/completions", **body, response_format=one).json()["choices"][0][
            "message"
        ]
        assert (message["reasoning"], message["content"]) == ("It may rain.", '"It/s"'), one
    named = {"type": "function", "function": {"name": "clock"}}
    for choice in ("required", named):
        tools = {"tools": TOOLS[1:], "tool_choice": choice}
        message = server.post("/v1/chat/completions", **body, **tools).json()["choices"][0]["message"]
        assert message["reasoning"] == "It may rain." and message["content"] is None
        assert [one["function"] for one in message["tool_calls"]] == [{"name": "clock", "arguments": "{}"}]


def test_special_tokens_mark_channels(recited: tuple[Running, dict[str, Any]], workshop: Path) -> None:
    """They are read, but no text of the answer."""
    template = workshop / "channels.jinja"
    template.write_text(TEMPLATE.replace("</think>", "<|channel|><|message|><|end|>"))
    with Running(model=workshop / "reciting", served_model_name=("demo",), chat_template=template) as server:
        asked = recited[1]

        def answer(script: str, **more: Any) -> Any:
            body: Any = {"model": "demo", "messages": asked[script], "temperature": 0, **more}
            [choice] = server.client().chat.completions.create(**body).choices
            assert choice.message.reasoning == "It may rain."
            return choice

        assert answer("channels").message.content == "It rains."
        called = answer("channel of a call", tools=TOOLS)
        assert called.finish_reason == "tool_calls" and called.message.tool_calls[0].function.name == "clock"
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["Oslo"]}}}
        assert answer("channels", response_format=schema).message.content == '"Oslo"'
        assert answer("channels", tools=TOOLS[1:], tool_choice="required").message.tool_calls


def test_structural_tags_bind_parts_of_the_answer(recited: tuple[Running, dict[str, Any]]) -> None:
    server, asked = recited
    schema = {"type": "object", "properties": {"city": {"const": "Oslo"}}, "required": ["city"]}
    content = {"type": "json_schema", "json_schema": schema}
    begin, end = '<tool_call>{"name": "weather", "arguments": ', "}</tool_call>"
    tag = {"type": "tag", "begin": f"<tool_call>\n{begin[11:]}", "content": content, "end": end}
    older = {
        "structures": [{"begin": tag["begin"], "schema": schema, "end": end}],
        "triggers": ["<tool_call>"],
    }
    newer = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag], "stop_after_first": True}
    body: Any = {"model": "demo", "messages": asked["call"], "temperature": 0, "max_tokens": 120}
    for one in (older, {"format": newer}):
        given = {"response_format": {"type": "structural_tag", **one}, "tools": TOOLS}
        [choice] = server.client().chat.completions.create(**body, **given).choices
        assert choice.message.reasoning == "It may rain." and choice.message.content.startswith("Look.")
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    sequence = {"type": "sequence", "elements": [{"type": "const_string", "value": "A"}, tag]}
    for tags in ({"format": sequence}, json.dumps({"format": sequence})):
        given = {"extra_body": {"structured_outputs": {"structural_tag": tags}}}
        [choice] = server.client().chat.completions.create(**body, **given).choices
        assert choice.message.content == f'A{tag["begin"]}{{"city":"Oslo"}}{end}'


def nested(depth: int) -> dict[str, Any]:
    """A tag in a tag, each with two ends."""
    content = nested(depth - 1) if depth else {"type": "any_text"}
    return {"type": "tag", "begin": "a", "end": ["b", "c"], "content": content}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"format": nested(40)}, "it is too large: give its tags fewer formats or ends"),
        ({"triggers": ["a"] * 1001, "structures": [{"begin": "a", "schema": {}, "end": ""}]}, "at most 1000"),
        ({"triggers": ["a"]}, "needs format, or structures and triggers"),
        ({"format": {"type": "qwen_xml_parameter"}}, "type must be one of const_string"),
        (
            {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]},
            "none of the triggers",
        ),
    ],
)
def test_structural_tags_that_cannot_be_followed_are_refused(
    recited: tuple[Running, dict[str, Any]], given: dict[str, Any], words: str
) -> None:
    server, asked = recited
    wanted = {"type": "structural_tag", **given}
    for path, more in (("chat/completions", {"messages": asked["rain"]}), ("completions", {"prompt": "."})):
        refused = server.post(f"/v1/{path}", model="demo", **more, response_format=wanted)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"], refused.text


def test_the_other_apis_show_reasoning_in_their_own_form(recited: tuple[Running, dict[str, Any]]) -> None:
    server, asked = recited
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tools = [
        {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in TOOLS
    ]
    body: Any = {
        "model": "demo",
        "max_tokens": 500,
        "messages": asked["call"],
        "extra_body": {"temperature": 0},
        "tools": tools,
    }
    with client.messages.stream(**body, thinking={"type": "enabled", "budget_tokens": 99}) as stream:
        blocks = stream.get_final_message().content
    assert [one.type for one in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0].thinking, blocks[1].text, blocks[2].input) == (
        "It may rain.",
        "Look.",
        json.loads(WEATHER[1]),
    )
    assert client.messages.create(**body, thinking={"type": "adaptive"}).content[0].thinking == "It may rain."
    assert [one.type for one in client.messages.create(**body).content] == ["text", "tool_use", "tool_use"]

    tools = [{"type": "function", **one["function"]} for one in TOOLS]
    asks: Any = {"model": "demo", "input": asked["call"], "temperature": 0, "tools": tools}
    whole = server.client().responses.create(**asks)
    with server.client().responses.stream(**asks) as events:
        streamed = events.get_final_response()
    with server.client().responses.stream(**asks, top_logprobs=1) as events:
        with_log_probs = events.get_final_response()
    for answer in (whole, streamed, with_log_probs):
        assert [one.type for one in answer.output] == ["reasoning", "message", *["function_call"] * 2]
        assert answer.output[0].content[0].text == "It may rain." and answer.output_text == "Look."
        assert answer.output[2].arguments == WEATHER[1]
        assert answer.usage.output_tokens_details.reasoning_tokens == 14
    asks["input"] = [*asked["call"], *whole.model_dump(exclude_none=True)["output"]]
    assert server.post("/v1/responses", **asks, max_output_tokens=1).status_code == 200

    chat: Any = {
        "model": "demo",
        "messages": asked["call"],
        "think": True,
        "tools": TOOLS,
        "options": {"temperature": 0},
    }
    message = server.post("/api/chat", **chat, stream=False).json()["message"]
    assert (message["thinking"], message["content"], len(message["tool_calls"])) == (
        "It may rain.",
        "Look.",
        2,
    )
    lines = [json.loads(line)["message"] for line in server.post("/api/chat", **chat).text.splitlines()]
    assert "".join(one.get("thinking", "") for one in lines) == "It may rain."
    assert [call["function"] for one in lines for call in one.get("tool_calls", ())] == [
        one["function"] for one in message["tool_calls"]
    ]
    assert "thinking" in server.post("/api/show", model="demo").json()["capabilities"]
