"""Protects what the OpenAI server answers, route by route: bodies, statuses, streams and refusals, on the
demo's model and adapters."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import Replay, metric_types, without
from serving import DEMO, Running
from waiting import wait_for

from manylora.doors.cli.convert import main as convert

FRANCE = "What is the capital of France?\nAnswer:"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": CITY},
}
MUST_CALL = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}
BOUND = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
COLD = {"options": {"temperature": 0}}
SAMPLED = {"temperature": 3.0, "seed": 5, "max_tokens": 12}
LONG = {"prompt": "日本について教えてください。 \\n答え:", "model": "japanese", "max_tokens": 64}
ABOUT = "日本について教えてください。"
Body = dict[str, Any]


def completion(**body: Any) -> Body:
    return {"model": "demo", "prompt": FRANCE, "temperature": 0, **body}


def chat(**body: Any) -> Body:
    return {"model": "demo", "messages": CHAT, "temperature": 0, **body}


def response(**body: Any) -> Body:
    return {"model": "demo", "input": CHAT[0]["content"], "temperature": 0, **body}


def ollama(**body: Any) -> Body:
    return {"model": "demo", "messages": CHAT, "stream": False, **COLD, **body}


COMPLETIONS = {
    "greedy": completion(),
    "log probabilities": completion(logprobs=2, max_tokens=3),
    "echo": completion(echo=True),
    "an adapter": completion(model="chinese", logprobs=0),
    "an adapter of a base": completion(model="demo:japanese"),
    "an alias of the base": completion(model="llama"),
    "lora_model": completion(model="llama", lora_model="chinese"),
    "adapter_id": completion(adapter_id="chinese"),
    "lora_request": completion(lora_request={"lora_name": "japanese", "lora_int_id": 3}),
    "a mix in the name": completion(model="chinese+japanese", logprobs=0),
    "scales": completion(
        lora=[{"name": "chinese", "scale": 0.6}, {"name": "japanese", "scale": 0.3}], logprobs=0
    ),
    "scale 0": completion(lora=[{"name": "chinese", "scale": 0}]),
    "two prompts": completion(prompt=[FRANCE, "日本の首都はどこですか? \\n答え:"], max_tokens=6),
    "token ids": completion(prompt=[1, 331, 434, 297, 318, 316, 310, 1150, 36, 204, 289, 31]),
    "a stop text": completion(stop=["ri"]),
    "a stop text that is kept": completion(stop=["ri"], include_stop_str_in_output=True),
    "a stop token": completion(stop_token_ids=[78]),
    "one token": completion(max_tokens=1),
    "min_tokens": completion(min_tokens=8, max_tokens=10),
    "ignore_eos": completion(ignore_eos=True, max_tokens=10),
    "three samples": completion(**SAMPLED, n=3),
    "the best of three": completion(**SAMPLED, best_of=3),
    "top_k": completion(**SAMPLED, top_k=3),
    "top_p and min_p": completion(**SAMPLED, top_p=0.6, min_p=0.05),
    "penalties": completion(presence_penalty=2.0, frequency_penalty=2.0, max_tokens=12, ignore_eos=True),
    "a repetition penalty": completion(repetition_penalty=3.0, max_tokens=12, ignore_eos=True),
    "a bias": completion(logit_bias={"100": 50}, max_tokens=3),
    "allowed tokens": completion(allowed_token_ids=[100, 101], max_tokens=3),
    "bad words": completion(bad_words=[" Paris"], max_tokens=6),
    "a guide": completion(guided_regex="[a-c]{4}x"),
    "a choice": completion(structured_outputs={"choice": ["yes", "no"]}),
    "beams": completion(use_beam_search=True, n=2, best_of=3),
    "a cut prompt": completion(truncate_prompt_tokens=4, max_tokens=4),
    "its token ids": completion(return_token_ids=True),
    "tokens as ids": completion(return_tokens_as_token_ids=True, logprobs=1, max_tokens=2),
    "a suffix": completion(suffix="x"),
    "an unknown model": completion(model="klingon"),
    "an unknown adapter of the base": completion(model="demo:klingon"),
    "an unknown field": completion(temprature=1),
    "no prompt": {"model": "demo"},
    "a temperature below 0": completion(temperature=-1),
    "a top_p above 1": completion(top_p=2),
    "no tokens": completion(max_tokens=0),
    "more tokens than the context": completion(max_tokens=100000),
    "a long prompt": completion(prompt=[5] * 3000),
    "many log probabilities": completion(logprobs=1000),
    "n below 1": completion(n=0),
    "a bad guide": completion(guided_regex="("),
    "unknown token ids": completion(prompt=[99999]),
    "a bias of an unknown token": completion(logit_bias={"99999": 1}),
    "two names of adapters": completion(model="chinese", lora_model="japanese"),
    "an odd scale": completion(lora=[{"name": "chinese", "scale": 1e9}]),
    "a stream of the best": completion(best_of=2, stream=True),
    "a text where a number is meant": completion(max_tokens="many"),
}
CHATS = {
    "greedy": chat(),
    "an adapter": chat(model="japanese", logprobs=True, top_logprobs=1, max_tokens=4),
    "a system message": chat(messages=[{"role": "system", "content": "Be brief."}, *CHAT]),
    "parts": chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": ABOUT}]}], model="japanese"
    ),
    "max_completion_tokens": chat(max_completion_tokens=2),
    "sampled": chat(**SAMPLED, n=2),
    "a tool that must be called": chat(**MUST_CALL),
    "a tool by its name": chat(
        tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=60
    ),
    "no tool": chat(tools=[WEATHER], tool_choice="none"),
    "a schema": chat(response_format=BOUND, max_tokens=40),
    "a continued message": chat(
        messages=[*CHAT, {"role": "assistant", "content": "Pa"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "a template": chat(chat_template="{{ messages[0].content }}\nAnswer:"),
    "an unknown role": chat(messages=[{"role": "robot", "content": "x"}]),
    "no messages": chat(messages=[]),
    "an image": chat(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    ),
    "audio": chat(modalities=["audio"]),
    "a tool without a name": chat(tools=[{"type": "function", "function": {}}]),
    "a tool that is not there": chat(
        tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "clock"}}
    ),
    "top_logprobs alone": chat(top_logprobs=3),
}
RESPONSES = {
    "greedy": response(),
    "an adapter": response(model="chinese"),
    "instructions": response(instructions="Be brief."),
    "messages": response(input=CHAT),
    "cut": response(max_output_tokens=2),
    "a schema": response(
        text={"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}},
        max_output_tokens=40,
    ),
    "a tool": response(
        tools=[{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
        tool_choice="required",
        max_output_tokens=60,
    ),
    "a previous response": response(previous_response_id="resp_1"),
    "in the background": response(background=True),
    "a tool of OpenAI's": response(tools=[{"type": "file_search"}]),
}
OLLAMA = {
    "chat": ("/api/chat", ollama()),
    "chat with an adapter": ("/api/chat", ollama(model="chinese:latest")),
    "chat in a schema": ("/api/chat", ollama(format=CITY)),
    "cut": ("/api/chat", ollama(options={"temperature": 0, "num_predict": 2})),
    "generate": ("/api/generate", {"model": "japanese", "prompt": FRANCE, "stream": False, **COLD}),
    "raw": ("/api/generate", {"model": "demo", "prompt": FRANCE, "raw": True, "stream": False, **COLD}),
    "show": ("/api/show", {"model": "chinese"}),
    "show an unknown model": ("/api/show", {"model": "klingon"}),
    "an unknown option": ("/api/chat", ollama(options={"mirostat": 2})),
    "embed": ("/api/embed", {"model": "demo", "input": "no"}),
}  # fmt: skip
OTHERS = {
    "tokenize": ("/tokenize", {"model": "demo", "prompt": FRANCE}),
    "tokenize as texts": (
        "/tokenize",
        {"prompt": "Rome", "add_special_tokens": False, "return_token_strs": True},
    ),
    "tokenize a chat": ("/tokenize", {"messages": CHAT}),
    "tokenize for an unknown model": ("/tokenize", {"model": "klingon", "prompt": "a"}),
    "detokenize": ("/detokenize", {"tokens": [415, 429, 78, 88]}),
    "detokenize unknown ids": ("/detokenize", {"tokens": [99999]}),
    "embeddings": ("/v1/embeddings", {"model": "demo", "input": ["no", FRANCE]}),
    "embeddings of an adapter": ("/v1/embeddings", {"model": "chinese", "input": "no"}),
    "embeddings that are cut": ("/v1/embeddings", {"model": "demo", "input": "no", "dimensions": 4}),
    "classes without a head": ("/v1/classify", {"model": "demo", "input": "no"}),
    "a score": ("/v1/score", {"model": "demo", "text_1": "no", "text_2": [FRANCE, "yes"]}),
    "a ranking": ("/v1/rerank", {"model": "demo", "query": "no", "documents": ["yes", "no"]}),
    "pooling": ("/pooling", {"model": "demo", "input": "no"}),
}
READ = {
    "models": "/v1/models",
    "a model": "/v1/models/chinese",
    "an unknown model": "/v1/models/klingon",
    "live": "/health/live",
    "ready": "/health/ready",
    "ping": "/ping",
    "tokenizer": "/tokenizer_info",
    "Ollama's tags": "/api/tags",
    "Ollama's version": "/api/version",
    "a path that is not there": "/v1/nothing",
    "Triton's path": "/v2/models",
    "a path without its prefix": "/chat/completions",
    "TGI's path": "/generate",
    "a completion by GET": "/v1/completions",
}
STREAMS = {
    "completion": ("/v1/completions", completion(stream_options={"include_usage": True})),
    "completion of an adapter": ("/v1/completions", completion(model="chinese", logprobs=1)),
    "completion with a stop text": ("/v1/completions", completion(**LONG, stop=["国"])),
    "three samples": ("/v1/completions", completion(**SAMPLED, n=3)),
    "chat": ("/v1/chat/completions", chat(stream_options={"include_usage": True})),
    "chat with a tool": ("/v1/chat/completions", chat(**MUST_CALL)),
    "chat of Ollama": ("/api/chat", ollama()),
    "generate of Ollama": ("/api/generate", {"model": "demo", "prompt": FRANCE, **COLD}),
}  # fmt: skip
ROUTE = "/v1/load_lora_adapter"
STEPS: dict[str, list[tuple[str, str, Any]]] = {
    "load, ask, load again, unload": [
        ("POST", ROUTE, {"lora_name": "zh", "lora_path": "{more}/chinese"}),
        ("POST", "/v1/completions", completion(model="zh")),
        ("POST", ROUTE, {"lora_name": "zh", "lora_path": "{more}/japanese"}),
        ("POST", ROUTE, {"lora_name": "zh", "lora_path": "{more}/japanese", "load_inplace": True}),
        ("POST", "/v1/completions", completion(model="zh")),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "zh"}),
        ("POST", "/v1/completions", completion(model="zh")),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "zh"}),
    ],
    "upload, ask, delete": [
        ("POST", ROUTE + "?lora_name=sent", b"chinese"),
        ("POST", "/v1/completions", completion(model="sent")),
        ("DELETE", "/v1/lora_adapters/sent", None),
        ("DELETE", "/v1/lora_adapters/sent", None),
    ],
    "uploads of rubbish": [
        ("POST", ROUTE + "?lora_name=sent", b"rubbish"),
        ("POST", ROUTE + "?lora_name=../sent", b"chinese"),
        ("POST", ROUTE, b"chinese"),
    ],
    "load what cannot be": [
        ("POST", ROUTE, {"lora_name": "x", "lora_path": "/no/such/folder"}),
        ("POST", ROUTE, {"lora_name": "x", "lora_path": "{more}"}),
        ("POST", ROUTE, {"lora_name": "x", "lora_path": "{demo}/base"}),
        ("POST", ROUTE, {"lora_name": "demo", "lora_path": "{more}/chinese"}),
        ("POST", ROUTE, {"lora_name": "a b", "lora_path": "{more}/chinese"}),
        ("POST", ROUTE, {"lora_name": "chinese", "lora_path": "{more}/japanese"}),
        ("POST", ROUTE, {"lora_path": "{more}/chinese"}),
        ("POST", ROUTE, {"lora_name": "x"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "nobody"}),
    ],
    "bodies that are no JSON": [
        ("POST", "/v1/completions", b"{"),
        ("POST", "/v1/chat/completions", b"[1]"),
        ("POST", "/v1/responses", b"\xff"),
        ("POST", "/api/chat", b"{"),
        ("PUT", "/v1/completions", None),
    ],
}
SCENARIOS: dict[str, list[tuple[str, str, Any]]] = {
    **{f"completions: {name}": [("POST", "/v1/completions", body)] for name, body in COMPLETIONS.items()},
    **{f"chat: {name}": [("POST", "/v1/chat/completions", body)] for name, body in CHATS.items()},
    **{f"responses: {name}": [("POST", "/v1/responses", body)] for name, body in RESPONSES.items()},
    **{f"ollama: {name}": [("POST", *call)] for name, call in OLLAMA.items()},
    **{f"others: {name}": [("POST", *call)] for name, call in OTHERS.items()},
    **{f"get: {name}": [("GET", path, None)] for name, path in READ.items()},
    **{
        f"stream: {name}": [("POST", path, body | {"stream": True})] for name, (path, body) in STREAMS.items()
    },
    **{f"adapters: {name}": steps for name, steps in STEPS.items()},
}
CHANGING = re.compile(
    r"(id|.*_id|request_id|created|created_at|completed_at|modified_at|arrival|.*duration|started|tier|version)"
)
"""Fields of answers that differ from one request, start or release to the next."""
TEMPORARY = re.compile(r"[0-9a-f]{16}\.safetensors")
DATA = re.compile(r"^data: (.*)$", re.MULTILINE)


class Door:
    def __init__(self, folder: Path) -> None:
        self._folders = {"more": folder / "more", "uploads": folder / "uploads", "demo": DEMO}
        shutil.copytree(DEMO / "adapters", folder / "more")
        self._files = {}
        for name in ("chinese", "japanese"):
            path = folder / f"{name}.safetensors"
            assert convert(["-i", str(DEMO / "adapters" / name), "-o", str(path), "--to", "llgtrt"]) == 0
            self._files[name.encode()] = path.read_bytes()
        self.server = Running(
            lora_root=(DEMO / "adapters",), allow_runtime_lora_updating=True, dtype="float32",
            lora_allowed_path=(folder / "more", DEMO), lora_refresh_seconds=3600.0,
            lora_upload_dir=folder / "uploads", lora_upload_bytes=2**22,
        )  # fmt: skip

    def send(self, method: str, path: str, body: Any) -> Any:
        """Status and body, without what changes."""
        if isinstance(body, bytes):
            content = self._files.get(body, body)
            kind = "application/octet-stream" if path.startswith(ROUTE) else "application/json"
        else:
            text = json.dumps(body)
            for name, folder in self._folders.items():
                text = text.replace(f"{{{name}}}", str(folder))
            content, kind = text.encode() if body is not None else b"", "application/json"
        answer = self.server.http.request(method, path, content=content, headers={"content-type": kind})
        found = self._read(answer.headers.get("content-type", ""), answer.text)
        return {"status": answer.status_code, "body": found}

    def _read(self, kind: str, text: str) -> Any:
        text = TEMPORARY.sub("….safetensors", without(text, **self._folders))
        if kind.startswith("text/event-stream"):
            events = [json.loads(one) for one in DATA.findall(text) if one != "[DONE]"]
            return {"done": "[DONE]" in text, **joined([plain(one) for one in events])}
        if kind.startswith("application/x-ndjson"):
            return joined([plain(json.loads(one)) for one in text.splitlines()])
        return plain(json.loads(text)) if kind.startswith("application/json") else text


def plain(value: Any) -> Any:
    """The answer with `…` for fields that change. Arguments and names keep their ids."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    models = value.get("object") in ("model", "lora_adapter")
    changes = {key for key in value if CHANGING.fullmatch(key) and not (models and key == "id")}
    return {key: "…" if key in changes and one is not None else plain(one) for key, one in value.items()}


def joined(events: list[Any]) -> dict[str, Any]:
    """A stream's pieces together: their number depends on who is quicker. Texts of one place are joined, and
    of other values the last one stays."""
    whole: dict[str, Any] = {}
    for event in events:
        gather(event, "", whole)
    return whole


def gather(value: Any, place: str, whole: dict[str, Any]) -> None:
    if isinstance(value, dict):
        number = value.get("index", "")
        for key, one in value.items():
            if key != "lora_versions":  # of the tokens of one piece
                gather(one, f"{place}{number}.{key}", whole)
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for one in value:
            gather(one, place, whole)
    elif place.endswith((".text", ".content", ".response", ".arguments")) and isinstance(value, str):
        whole[place] = whole.get(place, "") + value
    elif isinstance(value, list):
        if value or ".logprobs." not in place:  # the end may come in a piece of its own, without tokens
            whole[place] = whole.get(place, []) + value
    elif value is not None or place not in whole:
        whole[place] = value


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    made = Door(tmp_path_factory.mktemp("replay"))
    yield made
    made.server.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_openai(name: str, door: Door, replay: Replay) -> None:
    replay(name, [door.send(*step) for step in SCENARIOS[name]])


def test_openai_stream_of_a_response(door: Door, replay: Replay) -> None:
    answer = door.server.post("/v1/responses", **response(stream=True))
    events = [json.loads(one) for one in DATA.findall(answer.text)]
    replay("responses: a stream", {
        "types": list(dict.fromkeys(event["type"] for event in events)),
        "text": "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta"),
        "last": plain(events[-1]["response"]),
    })  # fmt: skip


def test_openai_metrics(door: Door, replay: Replay) -> None:
    door.server.post(**completion(model="chinese"))
    wait_for(lambda: door.server.metric("manylora_adapter_ttft_seconds_count"), what="the answer's metrics")
    replay("metrics", metric_types(door.server.http.get("/metrics").text))


def test_openai_schema(door: Door, replay: Replay) -> None:
    found = door.server.http.get("/openapi.json").json()
    fields = {name: sorted(one.get("properties", ())) for name, one in found["components"]["schemas"].items()}
    replay(
        "openapi.json",
        {"paths": {path: sorted(one) for path, one in found["paths"].items()}, "fields": fields},
    )


def test_every_record_is_played(replay: Replay) -> None:
    replay.check_names([*SCENARIOS, "responses: a stream", "metrics", "openapi.json"])
