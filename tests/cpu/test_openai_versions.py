"""Protects versions over HTTP: tensors put under a name serve at once, answers say which version made which
tokens, and running requests keep or follow."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from serving import DEMO, Running, adapter_file
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("one_thread", "forked_ranks")

LINE = "What is the capital of France?\nAnswer:"
ANSWERS = {"chinese": "巴黎", "japanese": "パリ"}


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    (tmp_path / "root").mkdir()
    ranks = {"tensor_parallel_size": getattr(request, "param", 1)}
    running = Running(allow_runtime_lora_updating=True, lora_root=(tmp_path / "root",), sections=ranks)
    yield running
    running.close()


with_two_ranks = pytest.mark.parametrize("server", [1, 2], ids=["one process", "two ranks"], indirect=True)


def body(name: str) -> bytes:
    return (DEMO / "adapters" / name / "adapter_model.safetensors").read_bytes()


def config(name: str) -> str:
    return (DEMO / "adapters" / name / "adapter_config.json").read_text()


def put(server: Running, name: str, language: str, **query: str) -> httpx2.Response:
    query = {"adapter_config": config(language)} | query
    headers = {"content-type": "application/octet-stream"}
    route = f"/v1/lora_adapters/{name}"
    return server.http.put(route, params=query, content=body(language), headers=headers)


def ask(server: Running, name: str) -> dict:
    answer = server.post(model=name, prompt=LINE, temperature=0)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@with_two_ranks
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
    assert answer.status_code == 200 and ask(server, "a/b")["text"].strip() == "巴黎"
    for number, language in enumerate(("chinese", "japanese"), 1):
        (tmp_path / "new.tmp").write_bytes(adapter_file(language))
        (tmp_path / "new.tmp").replace(tmp_path / "root" / "policy.safetensors")
        wait_for(lambda: server.http.get("/v1/models/policy").status_code == 200)
        wait_for(lambda: ask(server, "policy")["text"].strip() == ANSWERS[language])  # noqa: B023
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


@with_two_ranks
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
