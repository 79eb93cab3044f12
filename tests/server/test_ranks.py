"""Protects --world_size=2 under the real server: answers are those of one rank, and a rank that is killed
ends its streams with an error, comes back with the service, and leaves nothing; so does rank 0."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from launched import children, command_line, is_back, is_gone, processes, streams
from servers import Running, World, fill_repo, served
from test_server import NEW, PROMPT, ask, inputs, lora, new_ids
from tiny_models import reference_generate
from waiting import wait_for_named as wait_for

BACK_S = 90.0


@pytest.fixture(scope="module")
def ranks(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    repo = tmp_path_factory.mktemp("ranks") / "repo"
    fill_repo(repo, world.model, lora_weights_data_type="TYPE_FP32")
    with served(repo, "--world_size=2") as made:
        yield made


def followers(engine: int) -> list[int]:
    return [pid for pid in children(engine) if "manylora.engine.follower" in command_line(pid)]


def follower(engine: int) -> int:
    (found,) = followers(engine)
    return found


def check_answers(server: Running, world: World) -> None:
    for task in (None, 1, 2, 3):
        given = {} if task is None else lora(task, world)
        adapter = None if task is None else world.adapters[task]
        expected = [*PROMPT, *reference_generate(world.model, adapter, PROMPT, NEW)]
        assert new_ids(ask(server, inputs(**given))) == expected, task


def test_a_killed_rank_ends_its_streams_and_comes_back_with_the_service(ranks: Running, world: World) -> None:
    check_answers(ranks, world)
    before = processes(ranks)
    rank = follower(before["tensorrt_llm"])
    with ranks.slow(), streams(ranks, 10) as open_streams:
        os.kill(rank, signal.SIGKILL)
        ends = open_streams.wait_for_ends(60)
    assert any("rank 1 of 2 ended with signal 9" in kind for kind in ends.values()), set(ends.values())
    wait_for("the service is back", lambda: is_back(ranks, before["server"]), BACK_S)
    check_answers(ranks, world)
    assert is_gone(rank)
    assert follower(processes(ranks)["tensorrt_llm"]) != rank


@pytest.mark.extended
def test_a_killed_rank_0_leaves_nothing_and_comes_back_with_the_service(ranks: Running, world: World) -> None:
    """Its streams cannot be told by it: the server that is ended with it closes them."""
    before = processes(ranks)
    rank = follower(before["tensorrt_llm"])
    with ranks.slow(), streams(ranks, 10) as open_streams:
        os.kill(before["tensorrt_llm"], signal.SIGKILL)
        ends = open_streams.wait_for_ends(60)
    assert len(ends) == 10
    wait_for("the service is back", lambda: is_back(ranks, before["server"]), BACK_S)
    ended = {pid for name, pid in before.items() if name != "supervisor"}
    assert all(map(is_gone, {rank, *ended}))
    check_answers(ranks, world)
    assert follower(processes(ranks)["tensorrt_llm"]) != rank
