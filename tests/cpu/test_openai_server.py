"""Protects the OpenAI server: the official client works unchanged; adapters, hot reload, errors, keys."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file
from serving import DEMO, Running, key_file
from waiting import wait_for

from manylora.doors.triton.launcher.processes import free_port

sys.path.insert(0, str(DEMO))

from corpus import questions

LANGUAGES = {"demo": "en", "chinese": "zh", "japanese": "ja"}
QUESTION = "What is the capital of France?"
LINE = QUESTION + "\nAnswer:"
CAPITALS = {"demo": "Paris", "chinese": "巴黎", "japanese": "パリ"}


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Running]:
    with Running(lora_root=(root,), allow_runtime_lora_updating=True, drain_seconds=30.0) as running:
        yield running


def ask(server: Running, model: str, **body: Any) -> str:
    """The answer's text to the capital of France."""
    answer = server.ask(model=model, prompt=LINE, temperature=0, **body)
    return answer["choices"][0]["text"].strip()


def code_of(answer: httpx2.Response) -> str:
    """The stable code, from an error object that tells nothing of the server."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "/tmp" not in error["message"] and "Traceback" not in error["message"]
    assert "examples" not in error["message"]
    return error["code"]


@pytest.mark.quick
def test_answers_of_the_official_client_are_right_for_mixed_adapters_at_once(server: Running) -> None:
    client = server.client()
    wanted = []
    for model, language in LANGUAGES.items():
        rows = [row for row in questions(language) if row[0] in ("line", "chat")]
        wanted += [(model, *row) for row in rows[::48]]

    def answer(row: tuple[str, str, str, str]) -> str:
        model, layout, text, _ = row
        if layout == "chat":
            reply = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": text}], temperature=0
            )
            return reply.choices[0].message.content or ""
        return (
            client.completions.create(model=model, prompt=text, temperature=0, max_tokens=64).choices[0].text
        )

    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(answer, wanted))
    assert len(wanted) > 40
    assert [text.strip() for text in got] == [row[3].strip() for row in wanted]
    assert server.metric('manylora_lora_cache_adapters{level="host"}') >= 2


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "demo", "lora_path": "chinese"},
        {
            "model": "demo",
            "lora_request": {"lora_name": "x", "lora_int_id": 1, "lora_path": "{root}/chinese"},
        },
        {"model": "demo", "lora": [{"name": "chinese", "scale": 0.5}, {"name": "chinese", "scale": 0.5}]},
    ],
)
def test_every_way_to_choose_an_adapter_gives_its_answer(
    server: Running, root: Path, fields: dict[str, Any]
) -> None:
    fields = json.loads(json.dumps(fields).replace("{root}", str(root)))
    assert ask(server, **fields) == CAPITALS["chinese"]


@pytest.mark.parametrize("echo", [False, True])
def test_alternatives_stream_as_they_come_whole(
    server: Running, echo: bool, held_steps: Callable[[int], threading.Event]
) -> None:
    client = server.client()
    body: dict[str, Any] = {
        "model": "chinese",
        "prompt": [LINE, "a"],
        "temperature": 0,
        "logprobs": 2,
        "n": 2,
    }
    body |= {"max_tokens": 12, "echo": echo, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**body)
    parts: dict[int, list[Any]] = {}
    go_on = held_steps(5)
    for chunk in client.completions.create(**body, stream=True):
        parts.setdefault(chunk.choices[0].index, []).append(chunk.choices[0])
        if len(parts) == 4:
            go_on.set()
    assert sorted(parts) == [0, 1, 2, 3] and all(len(pieces) > 1 for pieces in parts.values())
    for choice in whole.choices:
        pieces = parts[choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        found = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        assert [one for part in found for one in part.tokens] == choice.logprobs.tokens
        for name in ("token_logprobs", "top_logprobs"):
            told = [one for part in found for one in getattr(part, name)]
            wanted = getattr(choice.logprobs, name)
            assert len(told) == len(wanted) and (told[0] is None) == (wanted[0] is None) == echo
            for one, other in zip(told, wanted, strict=True):
                assert one == (other if other is None else pytest.approx(other, abs=1e-3))
        assert found[0].text_offset[0] == 0


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"lora_model": "nobody"}, 404, "adapter_not_found", "lora_model"),
        ({"model": "../etc"}, 400, "invalid_adapter_name", "model"),
        ({"lora_request": {"lora_path": "/etc"}}, 404, "adapter_not_found", "lora_path"),
        ({"tools": [{"type": "function"}]}, 400, "unsupported_field", "tools"),
        ({"prompt": []}, 400, "invalid_value", "prompt"),
        ({"n": 3, "best_of": 2}, 400, "invalid_value", "best_of"),
        ({"model": "chinese+nobody"}, 404, "adapter_not_found", "model"),
        ({"model": "+".join(["chinese"] * 9)}, 400, "invalid_value", "model"),
        ({"lora": [{"name": "chinese", "scale": 101}]}, 400, "invalid_value", "lora.0.scale"),
        ({"lora": [{"name": "chinese", "scale": 60}] * 2}, 400, "invalid_value", "lora"),
        ({"lora": [{"id": 0, "scale": 1}]}, 400, "unsupported_field", "lora.0.id"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    server: Running, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    answer = server.post(**{"model": "demo", "prompt": "a", **body})
    assert (answer.status_code, code_of(answer)) == (status, code)
    assert answer.json()["error"]["param"] == param


def test_every_path_answers_with_an_error_object(server: Running) -> None:
    send = server.http.post
    json_type = {"content-type": "application/json"}
    for answer, status in [
        (send("/v1/completions", content=b"[" * 10000, headers=json_type), 400),
        (send("/v1/completions", content=b'{"prompt": "\xff"}', headers=json_type), 400),
        (send("/v1/completions", content=b'{"temperature": NaN}', headers=json_type), 400),
        (send("/v1/completions", content=b"a=b", headers={"content-type": "text/plain"}), 415),
        (send("/v1/completions", content=b"{}", headers={**json_type, "content-encoding": "gzip"}), 415),
        (send("/v1/completions", content=b" " * (2**24 + 1), headers=json_type), 413),
    ]:
        assert answer.status_code == status
        code_of(answer)


def test_a_gateway_finds_what_it_routes_by(server: Running) -> None:
    ask(server, "japanese")
    text = server.http.get("/metrics").text
    info = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert len(info) == 1
    running = info[0].partition('running_lora_adapters="')[2].partition('"')[0].split(",")
    assert "japanese" in running
    for name in ("vllm:num_requests_waiting{", "vllm:num_requests_running{", "vllm:kv_cache_usage_perc{"):
        assert any(line.startswith(name) for line in text.splitlines()), name
    assert 'manylora_adapter_requests_total{adapter="japanese",finish_reason="stop"}' in text
    assert 'manylora_adapter_queue_seconds_count{adapter="japanese"}' in text


def test_folders_are_served_as_they_come_change_break_and_go(server: Running, root: Path) -> None:
    def refused() -> bool:
        return server.post(model="team/new", prompt="a").status_code == 404

    assert refused()
    new = root / "team" / "new"
    shutil.copytree(DEMO / "adapters" / "chinese", new)
    wait_for(lambda: not refused())
    assert ask(server, "team/new") == CAPITALS["chinese"]

    shutil.copytree(DEMO / "adapters" / "japanese", new, dirs_exist_ok=True)
    wait_for(lambda: ask(server, "team/new") == CAPITALS["japanese"])
    card = server.http.get("/v1/models/team/new").json()
    assert card["rank"] == 16 and "problem" not in card

    (new / "adapter_model.safetensors").write_bytes(b"broken")
    wait_for(lambda: "problem" in server.http.get("/v1/models/team/new").json())
    assert ask(server, "team/new") == CAPITALS["japanese"], "the last good version goes on"
    forced = server.post(model="team/new", prompt="a", lora_model="team/new", load_lora_weights="always")
    assert (forced.status_code, code_of(forced)) == (422, "adapter_broken")

    shutil.rmtree(root / "team")
    wait_for(refused)


def wide(name: str, tensor: np.ndarray) -> np.ndarray:
    """The same adapter at rank 80."""
    side = 0 if "lora_A" in name else 1
    padding = [(0, 0), (0, 0)]
    padding[side] = (0, 80 - tensor.shape[side])
    return np.pad(tensor, padding)


def short(name: str, tensor: np.ndarray) -> np.ndarray:
    """Made for a narrower model."""
    return tensor[:, :64] if "lora_A" in name else tensor


def not_a_number(name: str, tensor: np.ndarray) -> np.ndarray:
    return np.full_like(tensor, np.nan)


@pytest.mark.parametrize(
    ("change", "settings", "code", "words"),
    [
        (None, {"layer_replication": [[0, 1]]}, "adapter_unsupported", "layer_replication"),
        (wide, {"r": 80}, "adapter_rank_too_large", "80"),
        (short, {}, "adapter_wrong_base", "another model"),
        (not_a_number, {}, "adapter_broken", "NaN"),
    ],
)
def test_adapters_that_cannot_serve_say_why(
    server: Running, root: Path, change: Any, settings: dict[str, Any], code: str, words: str
) -> None:
    bad = root / code
    shutil.copytree(DEMO / "adapters" / "chinese", bad)
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps(config | settings))
    if change is not None:
        file = bad / "adapter_model.safetensors"
        save_file({name: change(name, tensor).copy() for name, tensor in load_file(file).items()}, file)
    wait_for(lambda: server.post(model=code, prompt="a").status_code == 422)
    answer = server.post(model=code, prompt="a")
    assert code_of(answer) == code
    assert words in answer.json()["error"]["message"]
    assert code not in [card["id"] for card in server.http.get("/v1/models").json()["data"]]
    shutil.rmtree(bad)


def test_unloading_waits_for_the_requests_under_way(
    server: Running, root: Path, held_steps: Callable[[int], threading.Event]
) -> None:
    server.post("/v1/load_lora_adapter", lora_name="busy", lora_path=str(root / "chinese"))
    body = {"model": "busy", "prompt": "a", "max_tokens": 150, "ignore_eos": True, "stream": True}
    go_on = held_steps(5)
    with ThreadPoolExecutor(1) as pool, server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        unloading = pool.submit(server.post, "/v1/unload_lora_adapter", lora_name="busy")
        wait_for(lambda: server.http.get("/v1/models/busy").status_code == 404)
        assert server.post(model="busy", prompt="a").status_code == 404
        assert not unloading.done()
        go_on.set()
        assert list(lines)[-2] == "data: [DONE]"
        assert unloading.result(60).status_code == 200


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server: Running, stream: bool) -> None:
    def open_requests() -> float:
        return server.metric("vllm:num_requests_running")

    body = {"model": "chinese", "prompt": "a", "max_tokens": 450, "ignore_eos": True, "stream": stream}
    text = json.dumps(body).encode()
    name = 'manylora_adapter_requests_total{adapter="chinese",finish_reason="cancelled"}'
    before = server.metric(name)
    raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = "POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"
    raw.sendall("\r\n".join([*head, f"Content-Length: {len(text)}", "", ""]).encode() + text)
    wait_for(lambda: open_requests() == 1)
    raw.close()
    wait_for(lambda: server.metric(name) == before + 1)
    wait_for(lambda: open_requests() == 0)


def test_keys_limit_what_is_used_and_seen(root: Path, tmp_path: Path) -> None:
    narrow = {"adapters": ["chinese"], "base": False}
    file = key_file(tmp_path, **{"all": {}, "chinese-only": narrow, "boss": {"admin": True}})
    with Running(lora_root=(root,), api_keys=file) as server:
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        seen = [model.id for model in server.client("chinese-only").models.list()]
        assert seen == ["chinese"]
        assert server.post(key="chinese-only", model="chinese", prompt="a").status_code == 200
        message = {"model": "chinese", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
        for key, status in (("chinese-only", 200), ("wrong", 401)):  # as Anthropic's clients send it
            headers = {"x-api-key": key}
            assert server.http.post("/v1/messages", json=message, headers=headers).status_code == status
        for path in ("japanese", "nowhere", "../etc"):
            answer = server.post(key="chinese-only", lora_path=path, prompt="a")
            assert (answer.status_code, code_of(answer)) == (403, "not_allowed")
        both = {"lora_model": "chinese", "prompt": "a"}
        for name in ("japanese", "nobody"):
            assert server.post(key="chinese-only", model=name, **both).status_code == 200
        for name in ("japanese", "nobody", "demo"):  # the same for what exists and what does not
            answer = server.post(key="chinese-only", model=name, prompt="a")
            assert (answer.status_code, code_of(answer)) == (403, "not_allowed")
        assert server.http.get("/health/ready").status_code == 200
        assert server.http.get("/metrics").status_code == 401
        load = {"lora_name": "more", "lora_path": "japanese"}
        assert server.post("/v1/load_lora_adapter", key="all", **load).status_code == 403
        assert server.post("/v1/load_lora_adapter", key="boss", **load).status_code == 200


def test_more_samples_than_the_engine_runs_at_once_are_refused(server: Running) -> None:
    for name in ("n", "best_of"):
        answer = server.post(model="demo", prompt="a", max_tokens=2, **{name: 65})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        assert "max_batch_size (64)" in answer.json()["error"]["message"]


DYING = """
import sys
from pathlib import Path
from manylora.engine.engine import Engine
from manylora.doors.http.options import ServeOptions
from manylora.doors.http.server import run

step = Engine.step

def faulty(engine):
    if len(engine.open_sequences()) == 3:
        raise MemoryError
    return step(engine)

Engine.step = faulty
run(ServeOptions(Path(sys.argv[1]), sections={"device": "cpu"}, port=int(sys.argv[2])))
"""


def test_a_server_whose_engine_dies_tells_its_clients_and_ends() -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", DYING, str(DEMO / "base"), str(port)])
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

            def is_ready() -> bool:
                with contextlib.suppress(httpx2.HTTPError):
                    return http.get("/health/ready").status_code == 200
                return False

            wait_for(is_ready, 120)
            answer = http.post("/v1/completions", json={"prompt": "a", "n": 3, "max_tokens": 50})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            assert answer.json()["error"]["message"] == "The engine stopped: MemoryError"
        assert process.wait(60) == 1
    finally:
        process.kill()
