"""Protects what operators set around the OpenAI server: where it listens, whose pages may use it, what it
records.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dashboard import without_samples
from serving import DEMO, Running, key_file
from waiting import wait_for

from manylora import cli
from manylora.doors.http.serving.connections import Clients, HttpLimits, listen_uds
from manylora.doors.triton.metrics import MAX_ADAPTERS
from manylora.errors import ConfigError


def test_a_unix_socket_serves_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = tmp_path / "openai.sock"
    with socket.socket(socket.AF_UNIX) as stale:  # as a killed server leaves it
        stale.bind(str(path))
    with Running(uds=path) as server:
        assert server.post(model="demo", prompt="a", max_tokens=2).status_code == 200
        with pytest.raises(ConfigError, match="another server listens there"):
            listen_uds(path, Clients(HttpLimits()))
        assert server.http.get("/health").status_code == 200
    (other := tmp_path / "notes").write_text("kept")
    with pytest.raises(ConfigError, match="or it is another file"):
        listen_uds(other, Clients(HttpLimits()))
    with pytest.raises(ConfigError, match="too long"):
        listen_uds(tmp_path / ("x" * 120), Clients(HttpLimits()))
    assert other.read_text() == "kept"


def test_pages_of_allowed_origins_may_ask() -> None:
    page = "https://app.example.com"
    asked = {"Origin": page, "Access-Control-Request-Method": "POST"}
    body = {"model": "demo", "prompt": "a", "max_tokens": 1}
    allowed = {"allowed_origins": (page,), "allowed_headers": ("authorization",), "allow_credentials": True}
    with Running(**allowed) as server:
        ask = server.http.options
        found = ask("/v1/completions", headers=asked | {"Access-Control-Request-Headers": "authorization"})
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == page
        assert found.headers["access-control-allow-credentials"] == "true"
        assert ask("/v1/completions", headers=asked | {"Origin": "https://x.org"}).status_code == 400
        answer = server.http.post("/v1/completions", json=body, headers={"Origin": page})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page
        refused = server.http.post("/v1/completions", json=body, headers={"Origin": "https://x.org"})
        assert refused.json()["error"]["code"] == "origin_not_allowed"
        assert refused.headers.get("access-control-allow-origin") is None


def test_the_prefix_cache_is_reset_for_all_or_for_one_adapter(tmp_path: Path) -> None:
    keys, alias = key_file(tmp_path, chief={"admin": True}, guest={}), (("support", "chinese@1,demo@1"),)
    options = {"api_keys": keys, "open_metrics": True, "lora_alias": alias}
    with Running(lora_root=(DEMO / "adapters",), **options) as server:
        prompt = list(range(1, 200))

        def reused(model: str) -> float:
            before = server.app.state.routes.context.backend.stats().kv_tokens_reused
            assert server.post(model=model, prompt=prompt, max_tokens=1, key="chief").status_code == 200
            return server.app.state.routes.context.backend.stats().kv_tokens_reused - before

        assert [reused("chinese"), reused("japanese"), reused("demo")] == [0, 0, 0]
        assert min(reused(name) for name in ("chinese", "japanese", "demo")) > 100
        assert server.post("/reset_prefix_cache?lora_name=chinese", "chief").status_code == 200
        assert reused("chinese") == 0 and reused("japanese") > 100 and reused("demo") > 100
        assert server.post("/reset_prefix_cache", "chief").status_code == 200
        assert [reused("chinese"), reused("japanese"), reused("demo")] == [0, 0, 0]
        assert server.post("/reset_prefix_cache?lora_name=support", "chief").status_code == 200
        assert [reused("chinese"), reused("demo")] == [0, 0]
        assert server.post("/reset_prefix_cache", "guest").status_code == 403
        missing = server.post("/reset_prefix_cache?lora_name=nobody", "chief")
        assert missing.status_code == 404 and missing.json()["error"]["param"] == "lora_name"


def test_a_request_with_a_lower_priority_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with Running(scheduling_policy="priority", max_batch_size=1) as server:
        backend, order = server.app.state.routes.context.backend, list[str]()
        queue, submit = backend.queue, backend.engine.submit
        note = lambda request, sink: order.append(request.request_id) or submit(request, sink)  # noqa: E731
        monkeypatch.setattr(backend.engine, "submit", note)

        def ask(priority: int) -> None:
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
            server.ask("/v1/chat/completions", **body, priority=priority, request_id=str(priority))

        with ThreadPoolExecutor(3) as threads:
            long = {"model": "demo", "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
            with server.http.stream("POST", "/v1/completions", json=long) as running:
                assert running.status_code == 200
                work = []
                for number, priority in enumerate((7, 3, -2), 1):
                    work.append(threads.submit(ask, priority))
                    wait_for(lambda number=number: queue.num_waiting == number)
            for one in work:  # the first one was cancelled
                one.result()
        assert order[1:] == ["-2-0", "3-0", "7-0"]
        assert server.post("/v1/embeddings", model="demo", input="a", priority=-1).status_code == 200


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_request_leaves_a_line_of_what_it_used(tmp_path: Path) -> None:
    keys, log = key_file(tmp_path, secret={"name": "team-a"}), tmp_path / "usage.jsonl"
    told = {"usage_log": log, "enable_prompt_tokens_details": True}
    with Running(lora_root=(DEMO / "adapters",), api_keys=keys, **told) as server:
        client, prompt = server.client("secret"), list(range(1, 100))
        for _ in range(2):
            answer = client.completions.create(
                model="chinese", prompt=prompt, max_tokens=3, n=2, extra_body={"ignore_eos": True}
            )
        names = {"x-request-id": "mine"}
        stream = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "a"}], max_tokens=2, stream=True,
            extra_headers=names, extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert list(stream)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # programs that rotate files send it
        wait_for(lambda: len(lines_of(log)) == 3)
        log.rename(rotated := tmp_path / "usage.jsonl.1")
        with server.http.stream(
            "POST",
            "/v1/completions",
            json={"model": "chinese", "prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True},
            headers={"Authorization": "Bearer secret"},
        ) as running:
            next(running.iter_bytes())
        client.embeddings.create(model="demo", input="a")
        wait_for(lambda: log.exists() and len(lines_of(log)) == 2)
    cold, warm, chat = lines_of(rotated)
    assert (cold["key"], cold["adapter"], cold["model"]) == ("team-a", "chinese", "chinese")
    assert cold["version"] == 1 and len(cold["digest"]) >= 32 and cold["route"] == "/v1/completions"
    assert cold["status"] == 200 and cold["prompt_tokens"] == answer.usage.prompt_tokens == 99
    assert cold["completion_tokens"] == answer.usage.completion_tokens == 6
    assert cold["cached_tokens"] == 0 < warm["cached_tokens"] < 99
    assert answer.usage.prompt_tokens_details.cached_tokens == warm["cached_tokens"]
    assert cold["adapter_load_seconds"] > 0 == warm["adapter_load_seconds"]
    for line in (cold, warm, chat):
        assert 0 <= line["queue_seconds"] < line["ttft_seconds"] <= line["total_seconds"]
    assert (chat["request_id"], chat["adapter"], chat["digest"]) == ("mine", None, None)
    assert chat["route"] == "/v1/chat/completions" and chat["completion_tokens"] == 2
    assert "secret" not in rotated.read_text()
    left, pooled = sorted(lines_of(log), key=lambda line: line["route"])
    assert left["status"] == 499 and 0 < left["completion_tokens"] < 2000
    assert (pooled["route"], pooled["completion_tokens"]) == ("/v1/embeddings", 0)


def test_every_door_keeps_a_key_to_one_model_and_leaves_a_line(tmp_path: Path) -> None:
    keys, log = key_file(tmp_path, team={}), tmp_path / "usage.jsonl"
    alias = (("support", "japanese@50,chinese@50"),)
    with Running(lora_root=(DEMO / "adapters",), api_keys=keys, usage_log=log, lora_alias=alias) as server:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "a", "max_tokens": 2},
            "/v1/chat/completions": chat,
            "/v1/messages": chat,
            "/v1/responses": {"input": "a", "max_output_tokens": 16},
            "/api/chat": {"messages": chat["messages"], "stream": False, "options": {"num_predict": 2}},
            "/v1/embeddings": {"input": "a"},
            "/generate": {"inputs": "a", "parameters": {"adapter_id": "support", "max_new_tokens": 2}},
            "/api/v1/asample": {
                "model_path": "tinker://support",
                "prompt": {"chunks": [{"tokens": [1, 2]}]},
                "sampling_params": {"max_tokens": 2},
            },
        }
        for path, body in bodies.items():
            model = {} if path in ("/generate", "/api/v1/asample") else {"model": "support"}
            answer = server.post(path, "team", **model, **body)
            assert answer.status_code == 200, answer.text
        line = {"custom_id": "a", "body": {"model": "support", "prompt": "a", "max_tokens": 2}}
        client = server.client("team")
        file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        wait_for(lambda: log.exists() and len(lines_of(log)) == len(bodies) + 1)
    found = lines_of(log)
    assert sorted({line["route"] for line in found}) == sorted(bodies)
    assert {(line["key"], line["status"], line["model"]) for line in found} == {
        ("team", 200, found[0]["adapter"])
    }
    assert len({line["adapter"] for line in found}) == 1 and all(line["prompt_tokens"] for line in found)


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    with Running(usage_log=Path("/dev/full")) as server:
        assert server.post(model="demo", prompt="a", max_tokens=1).status_code == 200
        wait_for(lambda: server.metric("manylora_usage_log_dropped_total") == 1)
        sample = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        assert server.post("/api/v1/asample", base_model="demo", **sample).status_code == 200
        wait_for(lambda: server.metric("manylora_usage_log_dropped_total") == 2)


@pytest.fixture(scope="module")
def canary() -> Iterator[Running]:
    with Running(
        lora_root=(DEMO / "adapters",),
        lora_alias=(("support", "japanese@10,chinese@90"),),
        allow_runtime_lora_updating=True,
    ) as server:
        yield server


def answered_by(server: Running, alias: str, users: Iterable[str]) -> dict[str, str]:
    client = server.client()
    return {
        user: client.completions.create(model=alias, prompt="a", max_tokens=1, user=user).model
        for user in users
    }


def test_an_alias_of_several_models_keeps_to_one_for_each_user(canary: Running) -> None:
    users = [f"user-{number}" for number in range(60)]
    first = answered_by(canary, "support", users)
    assert first == answered_by(canary, "support", users)
    few = {user for user, model in first.items() if model == "japanese"}
    assert 1 <= len(few) <= 15 and set(first.values()) == {"japanese", "chinese"}
    series = 'manylora_alias_requests_total{alias="support",model="japanese"}'
    assert canary.metric(series) == 2 * len(few)
    targets = [{"id": "japanese", "weight": 10}, {"id": "chinese", "weight": 90}]
    card = next(one for one in canary.client().models.list().data if one.id == "support")
    assert card.targets == targets and card.root == "chinese"
    assert canary.http.get("/v1/models/support").json()["targets"] == targets
    body = {"lora_name": "support", "alias_of": "japanese@50,chinese@50", "load_inplace": True}
    assert canary.post("/v1/load_lora_adapter", **body).status_code == 200
    later = answered_by(canary, "support", users)
    assert few < {user for user, model in later.items() if model == "japanese"}  # who had it keeps it
    body["alias_of"] = "japanese@0,demo@1"
    assert canary.post("/v1/load_lora_adapter", **body).status_code == 200
    assert set(answered_by(canary, "support", users[:5]).values()) == {"demo"}
    chat = {"model": "support", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    streamed = canary.http.post("/v1/chat/completions", json=chat | {"stream": True}).text
    assert '"model":"demo"' in streamed and '"model":"support"' not in streamed


def test_a_request_chooses_its_model_once(canary: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    inference, chosen = canary.app.state.routes.context.inference, list[str]()
    choose = inference.choose_adapter
    monkeypatch.setattr(inference, "choose_adapter", lambda *given: chosen.append("") or choose(*given))
    parameters = {"adapter_id": "support", "max_new_tokens": 1}
    assert canary.post("/generate", inputs="a", parameters=parameters).status_code == 200
    raw = {"model": "support", "prompt": "a", "raw": True, "stream": False}
    assert canary.post("/api/generate", **raw, options={"num_predict": 1}).status_code == 200
    assert len(chosen) == 2, "a second choice may be another model, with another tokenizer"


def test_labels_of_aliases_are_bounded(canary: Running) -> None:
    for number in range(MAX_ADAPTERS + 2):
        body = {"lora_name": f"alias-{number}", "alias_of": "japanese@1,chinese@0"}
        assert canary.post("/v1/load_lora_adapter", **body).status_code == 200
        answer = canary.post("/v1/embeddings", model=body["lora_name"], input="a")
        assert answer.status_code == 200
        assert canary.post("/v1/unload_lora_adapter", lora_name=body["lora_name"]).status_code == 200
    names = canary.http.get("/metrics").text.count("\nmanylora_alias_requests_total{")
    assert names == MAX_ADAPTERS + 1


@pytest.mark.parametrize(
    ("alias_of", "status", "words"),
    [
        ("japanese@10,nobody@90", 404, "nobody"),
        ("japanese@1,japanese@2", 400, "each once"),
        ("japanese@0,chinese@0", 400, "at least 1"),
        ("japanese@1,loop@1", 400, "stands for"),
    ],
)
def test_shares_that_cannot_be_are_refused(canary: Running, alias_of: str, status: int, words: str) -> None:
    answer = canary.ask("/v1/load_lora_adapter", status, lora_name="loop", alias_of=alias_of)
    error = answer["error"]
    assert words in error["message"] and error["param"] == "alias_of"


def test_every_panel_of_the_dashboard_finds_samples_in_a_scrape(canary: Running) -> None:
    canary.ask(model="chinese", prompt="a", max_tokens=2)
    scrape = canary.http.get("/metrics").text
    assert without_samples(scrape) == []
    assert without_samples(scrape.replace("manylora_adapter_ttft", "x")) != []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-alias", "a=b@x,c@1"], "with whole numbers"),
        (["--usage-log", "/nowhere/usage.jsonl"], "usage_log /nowhere/usage.jsonl cannot be written"),
        (["--allowed-origins", "https://a.org"], "must be a JSON list"),
        (["--allowed-origins", '["https://a.org/"]'], "is no origin"),
        (["--allowed-methods", '["GET"]'], "allowed_methods needs allowed_origins"),
    ],
)
def test_flags_that_cannot_work_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["serve", str(DEMO / "base"), *flags])
    except SystemExit as error:
        status = error.code
    assert status and words in capsys.readouterr().err


def test_serve_listens_on_a_unix_socket_and_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "openai.sock"
    command = [sys.executable, "-m", "manylora.cli", "serve", str(DEMO / "base"), "--uds", str(path)]
    refused = subprocess.run([*command, "--port", "8001"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "uds is instead of host and port" in refused.stderr
    process = subprocess.Popen([*command, "--restart"], stderr=subprocess.PIPE, env=os.environ, text=True)
    try:
        wait_for(path.exists)
        with socket.socket(socket.AF_UNIX) as client:
            wait_for(lambda: client.connect_ex(str(path)) == 0)
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert client.recv(64).startswith(b"HTTP/1.1 200")
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0 and f"unix socket {path}" in log, log
    assert not path.exists()
