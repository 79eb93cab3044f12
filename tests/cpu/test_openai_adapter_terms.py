"""Protects how adapters are kept: pinned in the cache, under aliases, for a time, of an owner, in quotas."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from serving import DEMO, Running, adapter_file
from waiting import wait_for

from manylora.adapters.catalog.entry import AdapterEntry
from manylora.doors.http.arguments import parse_options
from manylora.doors.http.serving import inference
from manylora.doors.python import LoraConfig
from manylora.errors import ConfigError

LINE = "What is the capital of France?\nAnswer:"
OTHERS = [f"{name}{number}" for number in range(1, 6) for name in ("chinese", "japanese")]
BODY = adapter_file("chinese")
MODULES = ["attn_q", "attn_k", "attn_v"]
KEYS = [
    {"name": "boss", "admin": True},
    {"name": "a", "load": True, "max_adapters": 2},
    {"name": "b", "load": True, "adapters": ["b/*", "a-*", "shared"], "base": False},
    {"name": "reader"},
    {"name": "few", "requests_per_minute": 3, "max_concurrent": 1},
    {"name": "q", "load": True},
]


def ask(server: Running, model: str, key: str = "", **body: Any) -> httpx2.Response:
    return server.post(key=key, model=model, prompt=LINE, temperature=0, **body)


def text(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"].strip()


def error(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def card(server: Running, name: str, key: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return server.http.get(f"/v1/models/{name}", headers=headers).json()


def names(server: Running, key: str = "") -> list[str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return [one["id"] for one in server.http.get("/v1/models", headers=headers).json()["data"]]


def loaded_series(server: Running) -> set[tuple[str, ...]]:
    """adapter_name, level, pinned and rank of the adapters that the metrics show in the cache."""
    lines = server.http.get("/metrics").text.splitlines()
    shown = [line for line in lines if line.startswith("vllm:lora_adapter_loaded{")]
    assert all(line.endswith("} 1") for line in shown)
    return {tuple(re.findall('="([^"]*)"', line)) for line in shown}


def resident(server: Running) -> dict[str, bool]:
    """Adapters in the cache; whether they are on the device."""
    found = server.app.state.routes.context.backend.stats().adapters.residents
    return {one.name: one.on_device for one in found}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve adapters of two contents each of its own rank-8 layout, in folders."""
    root = tmp_path_factory.mktemp("many")
    for number in range(6):
        for name in ("chinese", "japanese"):
            folder = root / f"{name}{number}"
            shutil.copytree(DEMO / "adapters" / name, folder)
            config = json.loads((folder / "adapter_config.json").read_text())
            config["lora_alpha"] = config["lora_alpha"] * (1 + number / 100)  # another content
            (folder / "adapter_config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def small(many: Path) -> Iterator[Running]:
    """A cache of 6 pages: chinese adapters have 1, japanese 2, as the largest has."""
    running = Running(
        lora_root=(many,),
        allow_runtime_lora_updating=True,
        sections={
            "lora_config": LoraConfig(
                max_lora_rank=16, max_loras=2, max_cpu_loras=2, lora_target_modules=MODULES
            )
        },
        lora_alias=(("stable", "chinese0"), ("prod", "stable"), ("plain", "demo"), ("later", "absent")),
    )
    yield running
    running.close()


def churn(server: Running) -> None:
    for name in OTHERS:
        assert ask(server, name, max_tokens=1).status_code == 200


def test_a_pinned_adapter_stays_and_there_is_room_for_others(small: Running) -> None:
    pin = lambda name, **more: small.post("/v1/pin_lora_adapter", lora_name=name, **more)  # noqa: E731
    assert pin("chinese0").status_code == 200
    assert card(small, "chinese0")["pinned"]
    assert small.metric("manylora_pinned_adapters ") == 1
    churn(small)
    assert resident(small)["chinese0"]
    assert text(ask(small, "chinese0")) == "巴黎"
    assert pin("japanese0").status_code == 200
    refused = pin("japanese1")
    assert error(refused) == (409, "no_room_to_pin")
    assert "must stay for the largest" in refused.json()["error"]["message"]
    churn(small)
    assert {"chinese0", "japanese0"} <= resident(small).keys()
    assert loaded_series(small) >= {
        ("chinese0", "gpu", "true", "8"),
        ("chinese0", "cpu", "true", "8"),
        ("japanese0", "gpu", "true", "16"),
    }
    assert small.metric("vllm:num_cpu_loaded_lora_adapters ") == len(resident(small))
    loaded = small.post("/v1/load_lora_adapter", lora_name="new", lora_path="japanese5", pinned=True)
    assert error(loaded) == (409, "no_room_to_pin")
    assert "new" not in names(small)
    assert pin("japanese0", pinned=False).status_code == 200
    loaded = small.post("/v1/load_lora_adapter", lora_name="new", lora_path="japanese5", pinned=True)
    assert loaded.status_code == 200
    churn(small)
    assert "new" in resident(small)
    assert small.post("/v1/unload_lora_adapter", lora_name="new").status_code == 200
    assert pin("chinese0", pinned=False).status_code == 200
    churn(small)
    assert "chinese0" not in resident(small)
    assert error(pin("nobody")) == (404, "adapter_not_found")


def test_an_alias_is_its_adapter(small: Running) -> None:
    assert text(ask(small, "prod")) == text(ask(small, "chinese0")) == "巴黎"
    assert text(ask(small, "plain")) == "Paris"
    answer = ask(small, "prod").json()
    assert answer["model"] == "prod"
    assert answer["system_fingerprint"] == ask(small, "chinese0").json()["system_fingerprint"]
    assert (card(small, "prod")["root"], card(small, "prod")["id"]) == ("chinese0", "prod")
    assert {"prod", "stable", "plain"} <= set(names(small))
    assert "later" not in names(small)
    assert error(ask(small, "later")) == (404, "adapter_not_found")
    assert small.metric('manylora_requests_total{adapter="prod"') == 0
    assert ask(small, "demo", lora_model="prod").json()["system_fingerprint"] == answer["system_fingerprint"]


def test_an_alias_can_be_moved_and_makes_no_circle(small: Running) -> None:
    load = lambda **body: small.post("/v1/load_lora_adapter", **body)  # noqa: E731
    assert load(lora_name="blue", alias_of="japanese1").status_code == 200
    assert text(ask(small, "blue")) == "パリ"
    assert error(load(lora_name="blue", alias_of="chinese1")) == (400, "adapter_exists")
    assert load(lora_name="blue", alias_of="chinese1", load_inplace=True).status_code == 200
    assert text(ask(small, "blue")) == "巴黎"
    assert load(lora_name="green", alias_of="blue").status_code == 200
    assert error(load(lora_name="blue", alias_of="green", load_inplace=True)) == (400, "alias_circle")
    assert error(load(lora_name="chinese2", alias_of="blue")) == (400, "adapter_exists")
    assert error(load(lora_name="x", alias_of="nobody")) == (404, "adapter_not_found")
    assert error(load(lora_name="x", alias_of="blue", lora_path="chinese1")) == (400, "missing_field")
    assert error(load(lora_name="x", alias_of="blue", pinned=True)) == (400, "invalid_value")
    assert error(load(lora_name="blue", lora_path="chinese1", load_inplace=True)) == (400, "adapter_exists")
    for name in ("green", "blue"):
        assert small.post("/v1/unload_lora_adapter", lora_name=name).status_code == 200
        assert error(ask(small, name)) == (404, "adapter_not_found")
    assert text(ask(small, "chinese1")) == "巴黎"


@pytest.mark.parametrize("given", [["a=b", "b=a"], ["a=a"], ["demo=x"]])
def test_aliases_on_the_command_line_are_checked(given: list[str]) -> None:
    flags = [part for one in given for part in ("--lora-alias", one)]
    with pytest.raises(ConfigError, match=r"lora_alias|base model's name"):
        parse_options([str(DEMO / "base"), "--served-model-name", "demo", *flags])


def test_an_idle_adapter_leaves(
    small: Running, monkeypatch: pytest.MonkeyPatch, held_steps: Callable[[int], threading.Event]
) -> None:
    """It is idle once nobody has used it for so long; a request that takes longer uses it all the time."""
    looked: list[str] = []
    expired = AdapterEntry.has_expired.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        AdapterEntry, "has_expired", property(lambda one: looked.append(one.name) or expired(one))
    )
    body = {"lora_name": "brief", "lora_path": "chinese3", "idle_ttl_seconds": 1000}
    assert small.post("/v1/load_lora_adapter", **body).status_code == 200
    assert card(small, "brief")["idle_ttl_seconds"] == 1000
    entry = small.app.state.routes.context.backend.catalog.entry("brief")
    question = {"model": "brief", "prompt": LINE, "max_tokens": 150, "ignore_eos": True, "stream": True}
    go_on = held_steps(5)
    with small.http.stream("POST", "/v1/completions", json=question) as stream:
        lines = stream.iter_lines()
        next(lines)
        entry.used_at -= 1001
        looked.clear()
        wait_for(lambda: looked.count("brief") > 1)
        go_on.set()
        chunks = [line for line in lines if line.startswith("data: {")]
    assert "error" not in chunks[-1]
    looked.clear()
    wait_for(lambda: looked.count("brief") > 1)
    assert "brief" in names(small), "it was used until now"
    entry.used_at -= 1001
    wait_for(lambda: "brief" not in names(small))
    assert error(ask(small, "brief")) == (404, "adapter_not_found")
    at_once = small.post("/v1/load_lora_adapter", **{**body, "idle_ttl_seconds": 0})
    assert error(at_once) == (400, "invalid_value")


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Running]:
    found = [{**one, "sha256": hashlib.sha256(one["name"].encode()).hexdigest()} for one in KEYS]
    found[-1]["max_adapter_bytes"] = len(BODY) * 3 // 2
    (tmp_path / "keys.yaml").write_text(json.dumps({"keys": found}))
    running = Running(
        api_keys=tmp_path / "keys.yaml",
        lora_root=(DEMO / "adapters",),
        lora_upload_dir=tmp_path / "uploads",
    )
    yield running
    running.close()


def send(
    server: Running, name: str, key: str, content: bytes | Iterator[bytes], **terms: Any
) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/octet-stream"}
    query = {"lora_name": name, **terms}
    return server.http.post("/v1/load_lora_adapter", params=query, content=content, headers=headers)


def test_an_adapter_is_its_owners(owned: Running, tmp_path: Path) -> None:
    assert send(owned, "a-one", "a", BODY, idle_ttl_seconds=1000).status_code == 200
    assert text(ask(owned, "a-one", "a")) == text(ask(owned, "a-one", "boss")) == "巴黎"
    assert card(owned, "a-one", "a")["owned_by"] == "a"
    for key in ("b", "reader"):
        told, free = (ask(owned, name, key).json()["error"]["message"] for name in ("a-one", "a-two"))
        assert told.replace("a-one", "a-two") == free  # nobody learns that it exists
        assert error(ask(owned, "a-one", key)) == (404, "adapter_not_found")
        assert card(owned, "a-one", key)["error"]["code"] == "adapter_not_found"
        assert "a-one" not in names(owned, key)
        unloaded = owned.post("/v1/unload_lora_adapter", key=key, lora_name="a-one")
        assert error(unloaded) == (403, "not_allowed")
        tags = owned.http.get("/api/tags", headers={"Authorization": f"Bearer {key}"}).text
        assert "a-one" not in tags
    assert error(send(owned, "a-one", "b", BODY, load_inplace=True)) == (403, "not_allowed")
    assert error(send(owned, "demo:chinese", "a", BODY, public=True)) == (400, "invalid_adapter_name")
    assert error(send(owned, "c", "b", BODY)) == (403, "not_allowed")
    assert error(send(owned, "b/x", "b", BODY, owner="a")) == (403, "not_allowed")
    assert error(send(owned, "b/x", "b", BODY, pinned=True)) == (403, "not_allowed")
    path = {"lora_name": "b/x", "lora_path": "chinese"}
    assert error(owned.post("/v1/load_lora_adapter", key="b", **path)) == (403, "not_allowed")
    assert error(owned.post("/v1/pin_lora_adapter", key="b", lora_name="b/x")) == (403, "not_allowed")
    metrics = lambda key: owned.http.get("/metrics", headers={"Authorization": f"Bearer {key}"})  # noqa: E731
    assert metrics("boss").status_code == 200
    assert metrics("reader").status_code == 403
    assert send(owned, "a-two", "a", BODY, public=True).status_code == 200
    assert text(ask(owned, "a-two", "b")) == "巴黎"
    assert error(owned.post("/v1/unload_lora_adapter", key="b", lora_name="a-two")) == (403, "not_allowed")
    assert send(owned, "a-three", "boss", BODY, owner="b").status_code == 200
    assert text(ask(owned, "a-three", "b")) == "巴黎"
    assert error(send(owned, "a-four", "boss", BODY, owner="nobody")) == (400, "invalid_value")
    owned.post("/v1/load_lora_adapter", key="boss", lora_name="shared", alias_of="a-one")
    assert text(ask(owned, "shared", "b")) == "巴黎"  # the admin has chosen so
    again = Running(api_keys=tmp_path / "keys.yaml", lora_upload_dir=tmp_path / "uploads")  # a restart
    try:
        assert error(ask(again, "a-one", "b")) == (404, "adapter_not_found")
        assert text(ask(again, "a-one", "a")) == "巴黎"
        assert card(again, "a-one", "a")["idle_ttl_seconds"] == 1000
        assert text(ask(again, "a-two", "b")) == "巴黎"
    finally:
        again.close()


def test_every_request_that_costs_work_counts(owned: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(owned, "demo", "few", stream=True).status_code == 200
    assert error(ask(owned, "nobody", "few")) == (404, "adapter_not_found")
    assert owned.post("/tokenize", key="few", prompt="a").status_code == 200
    for answer in (owned.post("/tokenize", key="few", prompt="a"), ask(owned, "demo", "few")):
        assert error(answer) == (429, "rate_limit_exceeded")
    monkeypatch.setattr(inference, "PROBE_S", 1e9)
    probe = owned.app.state.routes._inference._generate_two
    with ThreadPoolExecutor(4) as pool:
        asked: list[Any] = []
        monkeypatch.setattr(
            owned.app.state.routes._inference,
            "_generate_two",
            lambda name: asked.append(name) or probe(name),  # type: ignore[func-returns-value]
        )
        health = lambda _: owned.http.get("/health/model", headers={"Authorization": "Bearer few"})  # noqa: E731
        assert [one.status_code for one in pool.map(health, range(12))] == [200] * 12
    assert len(asked) == 1, "they share one result"
    assert "demo" in names(owned, "few")


def test_a_quota_is_told_and_kept(owned: Running) -> None:
    assert send(owned, "one", "q", BODY).status_code == 200
    refused = send(owned, "two", "q", BODY)
    assert error(refused) == (403, "quota_exceeded")
    assert f"of {len(BODY) * 3 // 2} bytes (max_adapter_bytes)" in refused.json()["error"]["message"]

    def in_pieces() -> Iterator[bytes]:
        yield from (BODY[at : at + 65536] for at in range(0, len(BODY), 65536))

    assert error(send(owned, "two", "q", in_pieces())) == (403, "quota_exceeded")
    assert send(owned, "one", "q", BODY, load_inplace=True).status_code == 200
    assert owned.post("/v1/unload_lora_adapter", key="q", lora_name="one").status_code == 200
    assert send(owned, "two", "q", BODY).status_code == 200
    for name in ("a1", "a2"):
        assert send(owned, name, "a", BODY).status_code == 200
    refused = send(owned, "a3", "a", BODY)
    assert (error(refused), "own 2 adapters" in refused.text) == ((403, "quota_exceeded"), True)
