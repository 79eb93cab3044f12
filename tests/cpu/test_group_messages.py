"""Protects what ranks of a group tell each other: pages are given to another adapter after the steps that
read them, and a pause of all ranks is no loss of one."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from manylora.adapters.tensors import Adapter
from manylora.config.engine import EngineConfig
from manylora.engine.follower import Follower
from manylora.engine.step_messages import END, write_message
from manylora.ranks import leader as leader_module
from manylora.ranks import rendezvous
from manylora.ranks.channel import Channel, Message
from manylora.ranks.leader import Leader, Watch
from manylora.ranks.rank_info import RankInfo
from manylora.ranks.rendezvous import Link
from manylora.system.lifeline import OwnClock

PATIENCE_S = 60.0


@pytest.fixture
def channels() -> Iterator[tuple[Link, Channel, Channel]]:
    """Rank 0's link to rank 1, and the other ends of its two channels."""
    steps, adapters = (tuple(map(Channel, socket.socketpair())) for _ in range(2))
    yield Link(1, steps[0], adapters[0], None), steps[1], adapters[1]
    for one in (*steps, *adapters):
        one.close()


def open_leader(link: Link, patch: pytest.MonkeyPatch) -> Leader:
    watch = SimpleNamespace(links=[link], reason=None, close=lambda: None)
    patch.setattr(leader_module, "Watch", lambda *_: watch)
    patch.setattr(rendezvous, "open_store", lambda _: SimpleNamespace(port=0))
    patch.setattr(rendezvous, "group_store", lambda *_: None)
    patch.setattr(Leader, "_greet", lambda *_: None)
    return Leader(EngineConfig(Path()), RankInfo(0, 2, 0, 2))


def open_follower(patch: pytest.MonkeyPatch) -> Follower:
    """Without a model; each adapter is of no rows."""
    pool = SimpleNamespace(geometry=None, element_bytes=4, write_host=lambda *_: None)
    ops = SimpleNamespace(reserve=lambda *_: None)
    device = SimpleNamespace(ops=ops, torch=None, activate=lambda: None)
    slicer = SimpleNamespace(layout=lambda *_: None, slice=lambda adapter: adapter)
    parts = SimpleNamespace(device=device, limits=None, slicer=slicer)
    patch.setattr("manylora.engine.follower.open_pool", lambda _: pool)
    return Follower(parts)  # type: ignore[arg-type]


def test_pages_are_given_to_another_adapter_after_the_steps_that_read_them(
    channels: tuple[Link, Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may be behind: rank 0 does not wait for it after each step."""
    link, steps, adapters = channels
    leader, follower = open_leader(link, monkeypatch), open_follower(monkeypatch)
    go, found = threading.Event(), []

    def read(message: Message) -> None:
        assert go.wait(PATIENCE_S)
        found.append(sorted(follower._held))

    follower._do["read"] = read
    threads = [
        threading.Thread(target=follower.take_adapters, args=(adapters,), daemon=True),
        threading.Thread(target=follower.run, args=(steps,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    leader.ask(write_message(Adapter("old", (), ()), [0]))
    leader.tell(Message("read"))
    leader.tell(Message("read"))
    message = write_message(Adapter("new", (), ()), [0])
    writer = threading.Thread(target=leader.ask, args=(message,), daemon=True)
    writer.start()
    writer.join(0.3)
    assert writer.is_alive(), "written while a step was to read what was there before"
    go.set()
    writer.join(PATIENCE_S)
    leader.tell(Message("read"))
    leader.tell(Message(END, {"for_good": True}))
    threads[1].join(PATIENCE_S)
    assert found == [["old"], ["old"], ["new"]]


def test_a_pause_of_all_ranks_is_no_loss(
    channels: tuple[Link, Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a container that is paused; a silence while rank 0 runs is one."""
    link, steps, _ = channels
    pause, looks = [0.0], itertools.count()
    looked = [0.0, 0]  # the clock at the last look, and which look it was

    def clock() -> float:
        looked[:] = time.monotonic() + pause[0], next(looks)
        return looked[0]

    monkeypatch.setattr(leader_module, "OwnClock", partial(OwnClock, clock=clock))
    watch = Watch(2, [link])
    try:
        steps.send(Message("alive"))
        until(lambda: 1 in watch._heard)
        before, pause[0] = looked[0], 1000.0
        until(lambda: looked[0] > before + 1000.0)
        paused = looked[1]  # its ranks have been judged once the next look begins
        until(lambda: looked[1] > paused)
        assert watch.reason is None
        monkeypatch.setattr(leader_module, "SILENCE_S", 1.0)
        assert watch.wait_loss(PATIENCE_S) == "rank 1 of 2 has not answered for 1 s"
    finally:
        watch.close()


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
