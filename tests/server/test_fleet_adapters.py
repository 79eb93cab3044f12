"""Protects what an adapter may be in a fleet: replicas serve the same versions, mixes, activated LoRA and
embeddings, also one that starts later."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fleets import PROMPT, REPLICAS, Fleet, body, started, wait_for
from safetensors.torch import load_file, save_file

from manylora.testing.tiny_models import make_adapter, reference_generate

pytest.importorskip("ray", reason="the extra fleet is not installed: pip install -e '.[fleet]'")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with started(tmp_path_factory.mktemp("fleet"), REPLICAS, "--lora-refresh-seconds", "0.4") as running:
        yield running


def put(fleet: Fleet, name: str, adapter: str) -> None:
    """The adapter's tensors as the newest version of a name."""
    metadata = {"format": "pt", "adapter_config": (fleet.root / adapter / "adapter_config.json").read_text()}
    made = fleet.model / "new.tmp"
    save_file(load_file(fleet.root / adapter / "adapter_model.safetensors"), made, metadata)
    made.replace(fleet.root / f"{name}.safetensors")


def told(fleet: Fleet, name: str) -> dict[str, str]:
    """What each replica says that the name's digest is; those that a few requests have come to."""
    found = {}
    for _ in range(4 * REPLICAS):
        answer = httpx.get(f"{fleet.url}/v1/models/{name}", timeout=30)
        found[answer.headers["x-manylora-replica"]] = answer.json().get("digest", "")
    return found


def digest(fleet: Fleet, adapter: str) -> str:
    fleet.complete(adapter, 1).raise_for_status()
    return fleet.complete(adapter, 1).json()["choices"][0]["lora_versions"][0]["digest"]


def test_a_version_is_served_by_every_replica_also_by_one_that_starts_later(fleet: Fleet) -> None:
    wanted = {name: digest(fleet, name) for name in ("a0", "a1")}

    def everywhere(adapter: str) -> bool:
        found = told(fleet, "policy")
        return len(found) == REPLICAS and set(found.values()) == {wanted[adapter]}

    for adapter in ("a0", "a1"):
        put(fleet, "policy", adapter)
        wait_for(lambda: everywhere(adapter))  # noqa: B023
        [choice] = fleet.complete("policy").json()["choices"]
        assert [one["digest"] for one in choice["lora_versions"]] == [wanted[adapter]]
        assert choice["token_ids"] == reference_generate(fleet.model, fleet.root / adapter, PROMPT, 6)
    before = {one["replica"]: one["pid"] for one in fleet.replicas()}
    os.kill(next(iter(before.values())), signal.SIGKILL)
    wait_for(lambda: len({one["replica"] for one in fleet.replicas()} - before.keys()) == 1, 120)
    wait_for(lambda: everywhere("a1"))
    assert set(told(fleet, "policy")) != set(before)


def test_running_requests_keep_or_follow(fleet: Fleet) -> None:
    put(fleet, "trained", "a0")
    wait_for(lambda: fleet.complete("trained", 1).status_code == 200)
    spans: dict[str, list[str]] = {}

    def stream(kind: str, begun: threading.Barrier) -> None:
        asked = body("trained", 4000, stream=True, lora_version=kind)
        with httpx.stream("POST", f"{fleet.url}/v1/completions", json=asked, timeout=120) as answer:
            for number, line in enumerate(answer.iter_lines()):
                if number == 0:
                    begun.wait(60)
                if line.startswith("data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    spans[kind] = [one["digest"] for one in choice.get("lora_versions", [])]

    def swapped(adapter: str) -> bool:
        """Whether the request that follows was still under way when the new version came."""
        begun = threading.Barrier(3)
        threads = [threading.Thread(target=stream, args=(kind, begun)) for kind in ("keep", "follow")]
        for thread in threads:
            thread.start()
        begun.wait(60)
        put(fleet, "trained", adapter)
        for thread in threads:
            thread.join()
        assert len(spans["keep"]) == 1
        return len(spans["follow"]) == 2

    adapters = iter(["a1", "a2", "a3", "a0", "a1"])  # on a fast machine the answer may be done before
    wait_for(lambda: swapped(next(adapters)), 300)
    assert spans["follow"][0] == spans["keep"][0] != spans["follow"][1]


def test_mixes_meet_in_the_replica_of_their_first_adapter(fleet: Fleet) -> None:
    mix = {"lora": [{"name": "a2", "scale": 1}, {"name": "a3", "scale": 1}]}
    alone = {name: fleet.complete(name) for name in ("a2", "a3")}
    answers = [fleet.complete("a2+a3"), post(fleet, "completions", **body("base", 6), **mix)]
    tokens = [one.json()["choices"][0]["token_ids"] for one in answers]
    assert tokens[0] == tokens[1]
    assert tokens[0] not in [one.json()["choices"][0]["token_ids"] for one in alone.values()]
    owner = alone["a2"].headers["x-manylora-replica"]
    assert [one.headers["x-manylora-replica"] for one in answers] == [owner, owner]


def test_an_activated_adapter_acts_from_its_invocation_on(fleet: Fleet, tmp_path: Path) -> None:
    more = {"alora_invocation_tokens": PROMPT[2:4], "task_type": "CAUSAL_LM"}
    make_adapter(tmp_path / "judge", fleet.model, 9, **more).rename(fleet.root / "judge")
    wait_for(lambda: fleet.complete("judge", 1).status_code == 200)
    plain = reference_generate(fleet.model, None, PROMPT[:3], 6)
    without = post(fleet, "completions", **{**body("judge", 6), "prompt": PROMPT[:3]})
    assert without.json()["choices"][0]["token_ids"] == plain
    activated = fleet.complete("judge").json()["choices"][0]
    assert activated["token_ids"] != reference_generate(fleet.model, None, PROMPT, 6)


def test_embeddings_are_those_of_the_adapter(fleet: Fleet) -> None:
    def embed(name: str) -> list[float]:
        answer = post(fleet, "embeddings", model=name, input=[PROMPT]).raise_for_status()
        return answer.json()["data"][0]["embedding"]

    found = [embed(name) for name in ("base", "a0", "a1", "a0")]
    assert found[1] == found[3]
    assert len({tuple(one) for one in found}) == 3


def test_what_one_replica_only_would_hear_is_refused_by_name(fleet: Fleet) -> None:
    headers = {"content-type": "application/octet-stream"}
    answer = httpx.put(f"{fleet.url}/v1/lora_adapters/x", content=b"x", headers=headers)
    assert answer.status_code == 403 and "--lora-root" in answer.json()["error"]["message"]
    answer = post(fleet, "pin_lora_adapter", lora_name="a0")
    assert answer.status_code == 403 and "--pin" in answer.json()["error"]["message"]


def post(fleet: Fleet, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{fleet.url}/v1/{path}", json=fields, timeout=60)
