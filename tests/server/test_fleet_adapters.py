"""Protects adapters that requests change in a fleet: replicas serve the same versions, also one that starts
later or stood still; and replicas of several ranks, one of which is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fleets import PROMPT, REPLICAS, Fleet, is_ready, started
from safetensors.torch import load_file, save
from tiny_models import reference_generate
from waiting import wait_for

pytest.importorskip("ray", reason="the extra fleet is not installed: pip install -e '.[fleet]'")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    flags = "--lora-refresh-seconds", "0.4", "--allow-runtime-lora-updating"
    with started(tmp_path_factory.mktemp("fleet"), REPLICAS, *flags) as running:
        yield running


def send(fleet: Fleet, name: str, adapter: str, **query: str) -> httpx.Response:
    """The adapter's tensors as the body of a request."""
    metadata = {"adapter_config": (fleet.root / adapter / "adapter_config.json").read_text()}
    body = save(load_file(fleet.root / adapter / "adapter_model.safetensors"), metadata)
    headers = {"content-type": "application/octet-stream"}
    url = f"{fleet.url}/v1/lora_adapters/{name}"
    return httpx.put(url, content=body, params=query, headers=headers, timeout=90)


def cards(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    """What each replica says of a name: the least busy answers, so that all do in time."""
    seen: dict[str, dict[str, Any]] = {}

    def asked() -> bool:
        answer = httpx.get(f"{fleet.url}/v1/models/{name}", timeout=60)
        seen[answer.headers["x-manylora-replica"]] = answer.json()
        return len(seen) == REPLICAS

    wait_for(asked)
    return list(seen.values())


def spans(answer: httpx.Response) -> tuple[int, str]:
    """The version that made it, and its content."""
    [span] = answer.json()["choices"][0]["lora_versions"]
    return span["version"], span["digest"]


def versions(fleet: Fleet, name: str) -> set[tuple[int, str]]:
    """By the numbers of an answer, and the contents of each replica."""
    number, _ = spans(fleet.complete(name, 1).raise_for_status())
    return {(number, one.get("digest", "")) for one in cards(fleet, name)}


def test_what_was_sent_is_everywhere_when_the_answer_comes(fleet: Fleet) -> None:
    for number, adapter in enumerate(("a0", "a1"), start=1):
        answer = send(fleet, "sent", adapter).raise_for_status().json()
        assert (answer["version"], len(answer["replicas"]), answer["late"]) == (number, REPLICAS, {})
        assert versions(fleet, "sent") == {(number, answer["digest"])}
    [choice] = fleet.complete("sent").json()["choices"]
    assert choice["token_ids"] == reference_generate(fleet.model, fleet.root / "a1", PROMPT, 6)
    pinned = post(fleet, "pin_lora_adapter", lora_name="sent").raise_for_status()
    assert pinned.text.splitlines()[0] == "Success: LoRA adapter 'sent' is pinned."
    assert pinned.text.splitlines()[1] == f"On {REPLICAS} replicas, version 2, digest {answer['digest']}."
    assert all(one["pinned"] for one in cards(fleet, "sent"))

    before = {one["replica"]: one["pid"] for one in fleet.replicas()}
    os.kill(next(iter(before.values())), signal.SIGKILL)
    wait_for(lambda: len({one["replica"] for one in fleet.replicas()} - before.keys()) == 1, 120)
    assert versions(fleet, "sent") == {(2, answer["digest"])}
    assert all(one["pinned"] for one in cards(fleet, "sent")), "the new one has pinned it too"

    removed = httpx.delete(f"{fleet.url}/v1/lora_adapters/sent", timeout=90).raise_for_status().json()
    assert removed["deleted"] and len(removed["replicas"]) == REPLICAS
    assert {fleet.complete("sent", 1).status_code for _ in range(4 * REPLICAS)} == {404}


def test_a_replica_that_stands_still_is_named_and_follows_later(fleet: Fleet) -> None:
    """The one that serves an adapter: every change is made without it, and says so, and requests for that
    adapter, and for others, are answered meanwhile."""
    old = send(fleet, "behind", "a0").raise_for_status().json()["digest"]
    for name in ("deleted", "unloaded"):
        send(fleet, name, "a1").raise_for_status()
    owner = fleet.complete("behind", 1).headers["x-manylora-replica"]
    pid = next(one["pid"] for one in fleet.replicas() if one["replica"] == owner)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: fleet.cache()["missing"] == [owner])
        path = str(fleet.root / "a2")
        with ThreadPoolExecutor(8) as pool:  # together, before Ray replaces it
            objects = [
                pool.submit(send, fleet, "behind", "a3"),
                pool.submit(httpx.delete, f"{fleet.url}/v1/lora_adapters/deleted", timeout=90),
            ]
            texts = [
                pool.submit(post, fleet, "load_lora_adapter", lora_name="loaded", lora_path=path),
                pool.submit(post, fleet, "unload_lora_adapter", lora_name="unloaded"),
            ]
            others = [pool.submit(fleet.complete, name, 1) for name in ("behind", "a1", "a2") * 4]
        assert [one.result().status_code for one in objects + texts] == [202] * 4
        for one in objects:
            told = one.result().json()
            assert list(told["late"]) == [owner] and len(told["replicas"]) == REPLICAS - 1
        for one in texts:
            lines = one.result().text.splitlines()
            assert lines[0].startswith("Success") and lines[1].startswith(f"On {REPLICAS - 1} replica")
            assert [line for line in lines if "Not yet" in line] == lines[2:]
            assert lines[2].startswith(f"Not yet on replica {owner}:")
        new = objects[0].result().json()["digest"]
        assert {one.result().status_code for one in others} == {200}
        assert {spans(one.result()) for one in others[::3]} <= {(1, old), (2, new)}
        assert spans(fleet.complete("behind", 1)) == (2, new)
        statuses = [fleet.complete(name, 1).status_code for name in ("deleted", "unloaded", "loaded")]
        assert statuses == [404, 404, 200]
    finally:
        with suppress(ProcessLookupError):  # on a busy machine Ray may have replaced it
            os.kill(pid, signal.SIGCONT)
    for name, status in (("behind", 200), ("deleted", 404), ("unloaded", 404), ("loaded", 200)):
        answered = [fleet.complete(name, 1) for _ in range(12)]
        assert {one.status_code for one in answered} == {status}, name
        if name == "behind":
            assert {spans(one) for one in answered} == {(2, new)}
    wait_for(lambda: len(fleet.replicas()) == REPLICAS, 120)
    assert versions(fleet, "behind") == {(2, new)}
    assert len(versions(fleet, "loaded")) == 1


def post(fleet: Fleet, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{fleet.url}/v1/{path}", json=fields, timeout=60)


def followers(pid: int) -> list[int]:
    """The other ranks of a replica, which are its children."""
    found = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid=,args="], capture_output=True, text=True)
    lines = [line.split(None, 1) for line in found.stdout.splitlines()]
    return [int(number) for number, command in lines if "manylora.engine.follower" in command]


def test_a_replica_of_two_ranks_comes_back_whole_when_one_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, 1, "--tp-size", "2", "--dtype", "float32") as fleet:
        fleet.check_answers("base", "a0")
        [replica] = fleet.replicas()
        [rank] = followers(replica["pid"])
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{replica['pid']}").exists())
        wait_for(lambda: is_ready(fleet.url) and fleet.replicas(), 240)
        [another] = fleet.replicas()
        assert another["pid"] != replica["pid"]
        [fresh] = followers(another["pid"])
        assert fresh != rank
        fleet.check_answers("base", "a0")
        left = fresh
    wait_for(lambda: not Path(f"/proc/{left}").exists())
