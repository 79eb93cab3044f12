"""Protects adapters that come in requests: they serve at once, are replaced, deleted and kept within a limit;
what is no adapter leaves nothing behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from serving import DEMO, Running, adapter_file
from waiting import wait_for

LINE = "What is the capital of France?\nAnswer:"
ROUTE = "/v1/load_lora_adapter"
FILES = {name: adapter_file(name) for name in ("chinese", "japanese")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "uploads"


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    size = sum(map(len, FILES.values()))
    running = Running(
        allow_runtime_lora_updating=True,
        lora_upload_bytes=size + 5000,
        lora_upload_dir=folder,
        drain_seconds=1.0,
    )
    yield running
    running.close()


def send(server: Running, name: str, body: bytes | Iterator[bytes], **query: str) -> httpx2.Response:
    headers = {"content-type": "application/octet-stream"}
    return server.http.post(ROUTE, params={"lora_name": name, **query}, content=body, headers=headers)


def ask(server: Running, name: str) -> str:
    answer = server.post(model=name, prompt=LINE, temperature=0)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"].strip()


def held(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def test_one_file_is_kept_for_a_name_until_it_is_unloaded(server: Running, folder: Path) -> None:
    assert send(server, "team/zh.v2", FILES["chinese"]).status_code == 200
    assert ask(server, "team/zh.v2") == "巴黎" and held(folder) == ["team/zh.v2.safetensors"]
    assert send(server, "team/zh.v2", FILES["japanese"], load_inplace="true").status_code == 200
    assert ask(server, "team/zh.v2") == "パリ" and held(folder) == ["team/zh.v2.safetensors"]
    assert server.post("/v1/unload_lora_adapter", lora_name="team/zh.v2").status_code == 200
    assert held(folder) == []
    assert send(server, "team/zh.v2", FILES["chinese"]).status_code == 200
    assert server.http.delete("/v1/lora_adapters/team/zh.v2").status_code == 200
    assert held(folder) == []


def test_what_is_no_adapter_leaves_nothing_behind(server: Running, folder: Path) -> None:
    good = FILES["chinese"]
    assert send(server, "zh", good).status_code == 200
    for body in (b"", b"rubbish", good[:-1], good[:100]):
        answer = send(server, "zh", body, load_inplace="true")
        assert answer.status_code == 422, answer.text
        assert str(folder) not in answer.text
    assert ask(server, "zh") == "巴黎" and held(folder) == ["zh.safetensors"]
    hidden, meaning = (".hidden", ".incoming/x", "x/.y", "a/b/c/d/e/f/g"), ("demo", "llama:zh", "zh:latest")
    for name in ("", "../x", "a b", *hidden, *meaning):
        answer = send(server, name, good)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_adapter_name")
    odd = send(server, "x", good, load_inplace="perhaps")
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "load_inplace")
    # A client that leaves in the middle.
    raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = f"POST {ROUTE}?lora_name=half HTTP/1.1", "Host: x", "Content-Type: application/octet-stream"
    raw.sendall("\r\n".join([*head, f"Content-Length: {len(good)}", "", ""]).encode() + good[:1000])
    wait_for(lambda: len(held(folder)) == 2)
    raw.close()
    wait_for(lambda: held(folder) == ["zh.safetensors"])


def test_together_they_stay_within_the_limit(server: Running, folder: Path) -> None:
    for name, body in FILES.items():
        assert send(server, name, body).status_code == 200
    for body in (FILES["chinese"], iter([FILES["chinese"]])):  # its length is announced, and is not
        full = send(server, "more", body)
        assert (full.status_code, full.json()["error"]["code"]) == (413, "request_too_large")
    assert held(folder) == ["chinese.safetensors", "japanese.safetensors"]
    assert server.post("/v1/unload_lora_adapter", lora_name="japanese").status_code == 200
    assert send(server, "more", FILES["japanese"]).status_code == 200
    assert ask(server, "more") == "パリ"


def test_they_are_there_after_a_restart_and_may_be_forbidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the only one in its folder, and one that replaced an adapter of a root."""
    monkeypatch.chdir(folder.parent)
    options = {"lora_upload_dir": Path(folder.name), "lora_root": (DEMO / "adapters",)}
    first = Running(**options, allow_runtime_lora_updating=True)
    assert send(first, "team/zh", FILES["chinese"]).status_code == 200
    assert send(first, "chinese", FILES["japanese"], load_inplace="true").status_code == 200
    assert first.post(lora_path="team/zh.safetensors", prompt="a").status_code == 404, "paths of others"
    first.close()
    second = Running(**options, allow_runtime_lora_updating=True)
    assert ask(second, "team/zh") == "巴黎" and ask(second, "chinese") == "パリ"
    assert send(second, "team/zh", FILES["japanese"], load_inplace="true").status_code == 200
    assert ask(second, "team/zh") == "パリ"
    assert second.http.delete("/v1/lora_adapters/chinese").status_code == 200
    wait_for(lambda: second.http.get("/v1/models/chinese").status_code == 200)
    assert ask(second, "chinese") == "巴黎"
    second.close()
    closed = Running(lora_upload_bytes=0, allow_runtime_lora_updating=True)
    assert send(closed, "zh", FILES["chinese"]).json()["error"]["code"] == "not_allowed"
    closed.close()
    nobody = Running()
    assert send(nobody, "zh", FILES["chinese"]).status_code == 403
    nobody.close()
