"""Protects adapters that come in requests: they serve at once, answers say which version made which tokens,
running requests keep or follow; they are replaced, deleted and kept within a limit, and what is no adapter
leaves nothing behind."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from serving import DEMO, Running, adapter_file
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("one_thread")

LINE = "What is the capital of France?\nAnswer:"
ROUTE = "/v1/load_lora_adapter"
ANSWERS = {"chinese": "巴黎", "japanese": "パリ"}
FILES = {name: adapter_file(name) for name in ANSWERS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "uploads"


@pytest.fixture
def server(tmp_path: Path, folder: Path) -> Iterator[Running]:
    (tmp_path / "root").mkdir()
    running = Running(
        allow_runtime_lora_updating=True,
        lora_root=(tmp_path / "root",),
        lora_upload_bytes=2 * sum(map(len, FILES.values())) + 5000,
        lora_upload_dir=folder,
        drain_seconds=1.0,
    )
    yield running
    running.close()


def send(server: Running, name: str, body: bytes | Iterator[bytes], **query: str) -> httpx2.Response:
    headers = {"content-type": "application/octet-stream"}
    return server.http.post(ROUTE, params={"lora_name": name, **query}, content=body, headers=headers)


def config(name: str) -> str:
    return (DEMO / "adapters" / name / "adapter_config.json").read_text()


def put(server: Running, name: str, language: str, **query: str) -> httpx2.Response:
    body = (DEMO / "adapters" / language / "adapter_model.safetensors").read_bytes()
    query = {"adapter_config": config(language)} | query
    headers = {"content-type": "application/octet-stream"}
    route = f"/v1/lora_adapters/{name}"
    return server.http.put(route, params=query, content=body, headers=headers)


def ask(server: Running, name: str) -> dict:
    answer = server.post(model=name, prompt=LINE, temperature=0)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def text(server: Running, name: str) -> str:
    return ask(server, name)["text"].strip()


def held(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def test_one_file_is_kept_for_a_name_until_it_is_unloaded(server: Running, folder: Path) -> None:
    assert send(server, "team/zh.v2", FILES["chinese"]).status_code == 200
    assert text(server, "team/zh.v2") == "巴黎" and held(folder) == ["team/zh.v2.safetensors"]
    assert send(server, "team/zh.v2", FILES["japanese"], load_inplace="true").status_code == 200
    assert text(server, "team/zh.v2") == "パリ" and held(folder) == ["team/zh.v2.safetensors"]
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
    assert text(server, "zh") == "巴黎" and held(folder) == ["zh.safetensors"]
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
    for name, body in [*FILES.items(), ("zh", FILES["chinese"]), ("ja", FILES["japanese"])]:
        assert send(server, name, body).status_code == 200
    for body in (FILES["chinese"], iter([FILES["chinese"]])):  # its length is announced, and is not
        full = send(server, "more", body)
        assert (full.status_code, full.json()["error"]["code"]) == (413, "request_too_large")
    assert held(folder) == [f"{name}.safetensors" for name in ("chinese", "ja", "japanese", "zh")]
    assert server.post("/v1/unload_lora_adapter", lora_name="japanese").status_code == 200
    assert send(server, "more", FILES["japanese"]).status_code == 200
    assert text(server, "more") == "パリ"


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
    assert text(second, "team/zh") == "巴黎" and text(second, "chinese") == "パリ"
    assert send(second, "team/zh", FILES["japanese"], load_inplace="true").status_code == 200
    assert text(second, "team/zh") == "パリ"
    assert second.http.delete("/v1/lora_adapters/chinese").status_code == 200
    wait_for(lambda: second.http.get("/v1/models/chinese").status_code == 200)
    assert text(second, "chinese") == "巴黎"
    second.close()
    closed = Running(lora_upload_bytes=0, allow_runtime_lora_updating=True)
    assert send(closed, "zh", FILES["chinese"]).json()["error"]["code"] == "not_allowed"
    closed.close()
    nobody = Running()
    assert send(nobody, "zh", FILES["chinese"]).status_code == 403
    nobody.close()


def test_tensors_that_are_put_serve_at_once(server: Running) -> None:
    for number, language in enumerate(("chinese", "japanese", "japanese", "chinese"), 1):
        put_answer = put(server, "policy", language)
        assert put_answer.status_code == 200, put_answer.text
        told = put_answer.json()
        number = number if number < 3 else number - 1  # equal tensors are the same version
        assert (told["id"], told["version"]) == ("policy", number)
        choice = ask(server, "policy")
        assert choice["text"].strip() == ANSWERS[language]
        [span] = choice["lora_versions"]
        assert (span["name"], span["version"], span["digest"]) == ("policy", number, told["digest"])
        assert span["start"] == 0 and span["end"] > 0
    card = server.http.get("/v1/models/policy").json()
    assert (card["version"], card["digest"]) == (3, told["digest"])
    assert "lora_versions" not in ask(server, "demo")


def test_a_file_with_its_configuration_is_an_adapter(server: Running, tmp_path: Path) -> None:
    """As a body, and as a file that appears below a root."""
    headers, whole = {"content-type": "application/octet-stream"}, adapter_file("chinese")
    answer = server.http.put("/v1/lora_adapters/a/b", content=whole, headers=headers)
    assert answer.status_code == 200 and text(server, "a/b") == "巴黎"
    for number, language in enumerate(("chinese", "japanese"), 1):
        (tmp_path / "new.tmp").write_bytes(adapter_file(language))
        (tmp_path / "new.tmp").replace(tmp_path / "root" / "policy.safetensors")
        wait_for(lambda: server.http.get("/v1/models/policy").status_code == 200)
        wait_for(lambda: text(server, "policy") == ANSWERS[language])  # noqa: B023
        assert ask(server, "policy")["lora_versions"][0]["version"] == number


def test_what_cannot_be_served_changes_nothing(server: Running) -> None:
    assert put(server, "policy", "chinese").json()["version"] == 1
    bad = json.dumps(json.loads(config("chinese")) | {"peft_type": "NO_SUCH"})
    for answer, status, words in (
        (put(server, "policy", "chinese", adapter_config=bad), 422, "NO_SUCH"),
        (put(server, "policy", "chinese", adapter_config="{"), 422, "adapter_config"),
        (put(server, "policy", "chinese", adapter_config=""), 422, "adapter_config"),
        (put(server, "demo", "chinese"), 400, "base model"),
        (put(server, "../x", "chinese"), 404, ""),
        (server.http.put("/v1/lora_adapters/policy", json={}), 415, "application/octet-stream"),
    ):
        assert answer.status_code == status and words in answer.text, answer.text
        assert "/tmp" not in answer.text
    assert ask(server, "policy")["lora_versions"][0]["version"] == 1
    assert server.post(model="policy", prompt="a", lora_version="newest").status_code == 400
    nothing = server.post(model="demo", prompt="a", lora_version="follow")
    assert nothing.status_code == 400 and "follow needs an adapter" in nothing.json()["error"]["message"]


@pytest.mark.usefixtures("slow_steps")
def test_running_requests_keep_or_follow(
    server: Running, held_steps: Callable[[int], threading.Event]
) -> None:
    assert put(server, "policy", "chinese").status_code == 200
    spans: dict[str, list[dict]] = {}
    begun, go_on = threading.Barrier(3), held_steps(20)

    def stream(kind: str) -> None:
        asked = {"model": "policy", "prompt": LINE, "max_tokens": 200, "ignore_eos": True, "stream": True}
        more = {"lora_version": kind, "return_token_ids": True}
        with server.http.stream("POST", "/v1/completions", json={**asked, **more}) as answer:
            for number, line in enumerate(answer.iter_lines()):
                if number == 0:
                    begun.wait()
                if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                    spans[kind] = choices[0].get("lora_versions", [])

    threads = [threading.Thread(target=stream, args=(kind,)) for kind in ("keep", "follow")]
    for thread in threads:
        thread.start()
    begun.wait()
    assert put(server, "policy", "japanese").json()["version"] == 2
    go_on.set()
    for thread in threads:
        thread.join()
    assert [one["version"] for one in spans["keep"]] == [1]
    assert [one["version"] for one in spans["follow"]] == [1, 2]
    first, second = spans["follow"]
    assert first["start"] == 0 and 0 < first["end"] == second["start"] < second["end"] == 200


def test_two_trainers_of_one_name(server: Running) -> None:
    """The last one wins, and the numbers of its versions ascend."""
    found: list[int] = []

    def train(language: str) -> None:
        for _ in range(8):
            found.append(put(server, "policy", language).json()["version"])

    threads = [threading.Thread(target=train, args=(language,)) for language in ANSWERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = put(server, "policy", "japanese").json()
    assert last["version"] >= max(found)
    choice = ask(server, "policy")
    assert choice["text"].strip() == "パリ" and choice["lora_versions"][0]["digest"] == last["digest"]
