"""Protects ranks of one Triton engine on two hosts: answers are those of one process, a lost host comes back
with the service, twice; what does not fit is named on both, and what is stopped ends on both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from launched import is_back, is_gone, is_ready, processes, streams
from servers import Running, World, fill_repo, free_ports, new_server
from test_server import NEW, PROMPT, ask, inputs, lora, new_ids
from tiny_models import reference_generate
from waiting import wait_for_named as wait_for

BACK_S = 90.0
pytestmark = pytest.mark.extended  # test_ranks.py has two ranks, of one host


@dataclass
class Host:
    """What a command begins with there, and the variables that torchrun would set."""

    before: list[str]
    variables: dict[str, str]

    def start(self, command: list[str]) -> subprocess.Popen:
        environment = os.environ | self.variables | {"OMP_NUM_THREADS": "1"}
        out = subprocess.PIPE
        return subprocess.Popen([*self.before, *command], env=environment, stdout=out, stderr=out, text=True)


@dataclass
class Hosts:
    """The first is this one, the second a network namespace behind a cable."""

    both: list[Host]
    cable: list[str] = field(default_factory=list)

    def launch(self, servers: list[Running], *flags: str) -> list[tuple[int, str]]:
        """Of each launcher, its status and what it said on stderr."""
        started = [
            one.start(server.command("--world_size=2", *flags))
            for one, server in zip(self.both, servers, strict=True)
        ]
        said = [process.communicate(timeout=120)[1] for process in started]
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    name, number = f"manylora-t{os.getpid()}", os.getpid()
    net = f"10.{100 + number % 100}.{number // 100 % 250}"
    cable = [f"mt{number % 10**6}x{end}" for end in (0, 1)]
    steps = [
        ["netns", "add", name],
        ["link", "add", cable[0], "type", "veth", "peer", "name", cable[1], "netns", name],
        ["addr", "add", f"{net}.1/24", "dev", cable[0]],
        ["link", "set", cable[0], "up"],
        *(["-n", name, *rest] for rest in (
            ["addr", "add", f"{net}.2/24", "dev", cable[1]],
            ["link", "set", cable[1], "up"],
            ["link", "set", "lo", "up"],
        )),
    ]  # fmt: skip
    (port,) = free_ports(1)
    same = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    same |= {"MASTER_ADDR": f"{net}.1", "MASTER_PORT": str(port)}
    befores: list[list[str]] = [[], ["ip", "netns", "exec", name]]
    try:
        for step in steps:
            try:
                subprocess.run(["ip", *step], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip("network namespaces need iproute2 and root")
        yield Hosts([Host(befores[rank], same | {"RANK": str(rank)}) for rank in (0, 1)], cable)
    finally:
        with suppress(OSError):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def follower(server: Running, rank: str) -> dict:
    """The state of the launcher of another rank than 0; namespaces share the file system."""
    variables = os.environ | {"RANK": rank, "WORLD_SIZE": "2"}
    shown = subprocess.run(
        server.command("--status"), env=variables, capture_output=True, check=False, timeout=60
    )
    return json.loads(shown.stdout)


@dataclass
class Served:
    server: Running
    hosts: Hosts

    @property
    def follower_dir(self) -> Path:
        return self.server.run_dir.with_name(f"{self.server.run_dir.name}-rank1")

    def follower(self) -> dict:
        return follower(self.server, "1")


@pytest.fixture(scope="module")
def served(hosts: Hosts, world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repo = tmp_path_factory.mktemp("hosts") / "repo"
    server = new_server(fill_repo(repo, world.model, lora_weights_data_type="TYPE_FP32"))
    made = Served(server, hosts)
    for code, text in hosts.launch([server, server]):
        assert code == 0, text
    yield made
    assert server.launch("--stop").returncode == 0
    wait_for("the other host has ended too", lambda: not made.follower_dir.exists())
    assert not server.run_dir.exists()


def check_answers(server: Running, world: World) -> None:
    """Together, of the base and of adapters."""

    def answer(task: int | None) -> list[int]:
        return new_ids(ask(server, inputs(**({} if task is None else lora(task, world)))))

    tasks = [None, 1, 2, 3, None, 2, 1]
    with ThreadPoolExecutor(len(tasks)) as pool:
        for task, found in zip(tasks, pool.map(answer, tasks), strict=True):
            adapter = None if task is None else world.adapters[task]
            assert found == [*PROMPT, *reference_generate(world.model, adapter, PROMPT, NEW)], task


def test_answers_are_those_of_one_process(served: Served, world: World) -> None:
    check_answers(served.server, world)
    assert served.follower()["state"] == "ready"


def come_back(
    served: Served, world: World, lose: Callable[[], None], mend: Callable[[], None] = lambda: None
) -> None:
    """Have the other host lost under load, by `lose`."""
    before = processes(served.server)
    with streams(served.server, 10, endless=True) as open_streams:
        lose()
        wait_for("readiness is false", lambda: not is_ready(served.server))
        assert len(open_streams.wait_for_ends(60)) == 10
    mend()
    wait_for("the service is back", lambda: is_back(served.server, before["server"]), BACK_S)
    check_answers(served.server, world)


def test_a_killed_rank_comes_back_and_a_killed_launcher_joins_again_once_it_is_started(
    served: Served, world: World
) -> None:
    first = served.follower()
    come_back(served, world, lambda: os.kill(first["server"], signal.SIGKILL))
    second = served.follower()
    assert is_gone(first["server"])
    assert (second["supervisor"], second["restarts"]) == (first["supervisor"], 1)
    started: list[subprocess.Popen] = []

    def start() -> None:
        assert served.follower()["reason"] == "the supervisor was killed"
        started.append(served.hosts.both[1].start(served.server.command("--world_size=2")))

    come_back(served, world, lambda: os.kill(second["supervisor"], signal.SIGKILL), start)
    _, said = started[0].communicate(timeout=60)
    assert started[0].returncode == 0, said
    assert is_gone(second["server"])


def test_a_host_whose_cable_is_cut_comes_back_with_the_service(served: Served, world: World) -> None:
    def cable(state: str) -> None:
        end = ["-n", served.hosts.both[1].before[-1], "link", "set", served.hosts.cable[1]]
        subprocess.run(["ip", *end, state], check=True)

    def lose() -> None:
        cable("down")
        wait_for("the other host notices", lambda: served.follower()["restarts"] > before)

    before = served.follower()["restarts"]
    try:
        come_back(served, world, lose, lambda: cable("up"))
    finally:
        cable("up")


def test_a_stop_of_both_hosts_lets_requests_finish(served: Served) -> None:
    with served.server.slow() as brake, streams(served.server, 10) as open_streams:
        os.kill(served.follower()["supervisor"], signal.SIGTERM)
        brake.unlink()
        assert served.server.launch("--stop").returncode == 0
        assert set(open_streams.wait_for_ends(60).values()) == {"end"}


def test_what_does_not_belong_together_is_named_on_both_hosts(
    hosts: Hosts, world: World, tmp_path: Path
) -> None:
    repos = [fill_repo(tmp_path / size, world.model, max_num_sequences=size) for size in ("8", "3")]
    server = new_server(repos[0])
    said = hosts.launch([server, replace(server, repo=repos[1])])
    for code, text in said:
        assert code == 1
        assert "rank 1 was started with another max_batch_size than rank 0: 3, rank 0 has 8" in text
