"""Protects the fleet: real replicas on a real Ray, with requests, kills, and adapters that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import pytest
from fleets import ADAPTERS, REPLICAS, Fleet, body, started
from waiting import wait_for

pytest.importorskip("ray", reason="the extra fleet is not installed: pip install -e '.[fleet]'")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with started(tmp_path_factory.mktemp("fleet"), REPLICAS, "--lora-refresh-seconds", "1") as running:
        yield running


def test_answers_are_those_of_the_reference(fleet: Fleet) -> None:
    fleet.check_answers("base", "a0", "a1")


def test_an_adapter_stays_where_it_is_and_the_status_says_where(fleet: Fleet) -> None:
    homes = {}
    for name in [f"a{number}" for number in range(ADAPTERS)] * 3:
        homes.setdefault(name, set()).add(fleet.complete(name, 1).headers["x-manylora-replica"])
    assert all(len(replicas) == 1 for replicas in homes.values()), homes
    held = {one["name"]: replica["replica"] for replica in fleet.replicas() for one in replica["adapters"]}
    assert held == {name: next(iter(replicas)) for name, replicas in homes.items()}
    assert fleet.cache()["counts"]["cold_loads"] == ADAPTERS


def test_metrics_of_all_replicas_are_at_one_port(fleet: Fleet) -> None:
    lines = httpx.get(f"{fleet.url}/metrics", timeout=60).text.splitlines()
    names = {one["replica"] for one in fleet.replicas()}
    waiting = [line for line in lines if line.startswith("vllm:num_requests_waiting{")]
    assert {line.partition('replica="')[2].partition('"')[0] for line in waiting} == names
    assert lines.count("# TYPE vllm:num_requests_waiting gauge") == 1
    assert f'manylora_fleet_replicas{{state="running"}} {REPLICAS}' in lines


def test_adapters_come_and_go_without_a_restart(fleet: Fleet) -> None:
    shutil.copytree(fleet.root / "a0", fleet.root / "new")

    def everywhere(found: bool) -> bool:
        return all((fleet.complete("new", 1).status_code == 200) == found for _ in range(4))

    wait_for(lambda: everywhere(True))
    shutil.rmtree(fleet.root / "new")
    wait_for(lambda: everywhere(False))


def test_a_client_that_leaves_ends_its_generation(fleet: Fleet) -> None:
    def left() -> float:
        lines = httpx.get(f"{fleet.url}/metrics", timeout=60).text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("manylora_clients_left_total{")
        )

    before = left()
    long = body("a0", 4000, stream=True) | {"n": 8, "temperature": 1}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=long, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        next(answer.iter_lines())
    wait_for(lambda: left() == before + 1)
    wait_for(lambda: sum(one["running"] for one in fleet.replicas()) == 0)


async def stream(client: httpx.AsyncClient, url: str, adapter: str, tokens: int) -> str:
    text = ""
    async with client.stream(
        "POST", f"{url}/v1/completions", json=body(adapter, tokens, stream=True), timeout=120
    ) as answer:
        async for piece in answer.aiter_text():
            text += piece
    assert answer.status_code == 200, text
    return text


def test_of_a_killed_replica_only_begun_streams_end_and_they_say_so(fleet: Fleet) -> None:
    """Streams that are under way, and requests that come while the replica dies."""

    async def run() -> list[str]:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=200)) as client:
            names, busy = [f"a{number % ADAPTERS}" for number in range(8)], list[dict]()

            def begun_or_done() -> bool:
                busy[:] = [one for one in fleet.replicas() if one["running"] > 1]
                return bool(busy) or all(task.done() for task in begun)

            while not busy:  # again where they have ended before anybody saw them
                begun = [asyncio.create_task(stream(client, fleet.url, name, 1500)) for name in names]
                await asyncio.to_thread(wait_for, begun_or_done)
            os.kill(busy[0]["pid"], signal.SIGKILL)
            more = [asyncio.create_task(stream(client, fleet.url, f"a{n % ADAPTERS}", 4)) for n in range(40)]
            late = await asyncio.gather(*more)
            assert all(text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in late)
            return await asyncio.gather(*begun)

    begun = asyncio.run(run())
    assert all(text.endswith("data: [DONE]\n\n") for text in begun)
    cut = [json.loads(text.split("data: ")[-2]) for text in begun if '"error"' in text]
    assert cut
    assert {one["error"]["code"] for one in cut} == {"replica_lost"}
    wait_for(lambda: len(fleet.replicas()) == REPLICAS, 120)
    assert fleet.complete("a0").status_code == 200


def test_a_replica_that_is_stopped_holds_no_request_for_long(fleet: Fleet) -> None:
    """It still accepts connections, so only its silence shows it."""
    owner = fleet.complete("a0", 1).headers["x-manylora-replica"]
    victim = next(one["pid"] for one in fleet.replicas() if one["replica"] == owner)
    os.kill(victim, signal.SIGSTOP)
    try:
        lines = httpx.get(f"{fleet.url}/metrics", timeout=60).raise_for_status().text.splitlines()
        assert f'manylora_fleet_replica_up{{replica="{owner}"}} 0' in lines
        assert sum(line.startswith("manylora_fleet_replica_up{") for line in lines) == REPLICAS
        heard = {
            line.rpartition('replica="')[2] for line in lines if line.startswith("vllm:num_requests_waiting{")
        }
        assert len(heard) == REPLICAS - 1, "the others' figures are there"
        assert fleet.cache()["missing"] == [owner]
        held = fleet.complete("a0", timeout=180)  # until the replica is killed, or sent elsewhere
        assert held.status_code == 200, held.text
        pids = lambda: {one["pid"] for one in fleet.replicas()}  # noqa: E731
        wait_for(lambda: len(pids() - {victim}) == REPLICAS, 120)
    finally:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def test_a_pause_of_the_whole_fleet_costs_no_replica(fleet: Fleet) -> None:
    """As of a machine or a container, for longer than any of its processes may be silent alone."""

    def signal_all(number: int) -> None:
        found = subprocess.run(
            ["ps", "-s", str(fleet.process.pid), "-o", "pid="], capture_output=True, text=True
        )
        for pid in map(int, found.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    wait_for(lambda: len(fleet.replicas()) == REPLICAS, 120)
    before = {one["pid"] for one in fleet.replicas()}
    signal_all(signal.SIGSTOP)
    time.sleep(25)  # more than three times the seconds that a replica has for an answer
    signal_all(signal.SIGCONT)
    for number in range(ADAPTERS):
        assert fleet.complete(f"a{number}").status_code == 200
    wait_for(lambda: len(fleet.replicas()) == REPLICAS)
    assert {one["pid"] for one in fleet.replicas()} == before


def test_nothing_is_left_of_a_command_that_was_killed(tmp_path: Path) -> None:
    with started(tmp_path, 1) as fleet:
        fleet.process.kill()


@pytest.mark.extended
@pytest.mark.parametrize("lost", ["raylet", "gcs_server"])
def test_it_starts_again_when_a_process_of_ray_was_killed(tmp_path: Path, lost: str) -> None:
    with started(tmp_path, 1) as fleet:
        before = {one["pid"] for one in fleet.replicas()}
        [pid] = [int(line.split()[0]) for line in commands(fleet) if f"/{lost}" in line.split()[1]]
        os.kill(pid, signal.SIGKILL)

        def is_back() -> bool:
            with suppress(httpx.HTTPError):
                return not {one["pid"] for one in fleet.replicas()} <= before
            return False

        wait_for(is_back, 120)
        fleet.check_answers("base", "a0")
        log = (tmp_path / "fleet.log").read_text(encoding="utf-8")
        assert f"Ray's {lost} has ended with signal 9: the fleet starts again" in log


def commands(fleet: Fleet) -> list[str]:
    """Process id and command line of what it has started."""
    listed = ["ps", "-ww", "-s", str(fleet.process.pid), "-o", "pid=,args="]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()


def test_replicas_come_with_the_queue_and_go_with_it(tmp_path: Path) -> None:
    flags = ["--max-replicas", "2", "--target-requests", "2"]
    flags += ["--upscale-delay", "1", "--downscale-delay", "2"]

    async def run(fleet: Fleet) -> list[str]:
        """As many requests at one time as two replicas are for, until there are two and each has answered."""
        texts: list[str] = []
        enough = asyncio.Event()

        async def ask(client: httpx.AsyncClient, adapter: str) -> None:
            while not enough.is_set():
                texts.append(await stream(client, fleet.url, adapter, 200))

        async with httpx.AsyncClient() as client:
            askers = [asyncio.create_task(ask(client, f"a{number % ADAPTERS}")) for number in range(8)]
            both = lambda: [one["running"] > 0 for one in fleet.replicas()] == [True, True]  # noqa: E731
            try:
                await asyncio.to_thread(wait_for, both, 120)
            finally:
                enough.set()
                await asyncio.gather(*askers)
        return texts

    with started(tmp_path, 1, *flags) as fleet:
        texts = asyncio.run(run(fleet))
        assert all(text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in texts)
        # One goes while requests still come, and none of them is lost with it. What asks every replica is
        # a request too, so not after each.
        shrunk = lambda: len(fleet.replicas()) == 1  # noqa: E731
        wait_for(lambda: [fleet.complete("a0").raise_for_status() for _ in range(8)] and shrunk(), 120)
        left = {fleet.complete(f"a{n}").headers["x-manylora-replica"] for n in range(ADAPTERS)}
        assert left == {one["replica"] for one in fleet.replicas()}, "it serves what the other has held"
