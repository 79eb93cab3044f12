"""Watch: a thread on rank 0 that detects ranks that ended, hang or lost their host."""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manylora.group.channel import ChannelClosedError
from manylora.group.rendezvous import Link, spawn_ranks
from manylora.system.own_clock import OwnClock

logger = logging.getLogger("manylora")

PERIOD_S = 0.1
STOPPED_S = 3.0  # a process stopped by a signal for this long counts as lost
SILENCE_S = 30.0  # without reports, which come twice a second, a rank counts as lost
TURN_S = 1.0  # of `OwnClock`: the most that one check can add
LAST_WORDS_S = 1.0  # for a rank to exit after it closed its sockets
END_S = 5.0  # for ranks to exit by themselves


class Watch:
    """It also starts the ranks, because the system ends them with the thread that started them, and this
    thread lives as long as the process.

    links: to ranks that were started elsewhere. lost: called once, on this thread, with the reason.
    """

    def __init__(self, size: int, links: list[Link] | None = None) -> None:
        self.lost: Callable[[str], None] = lambda reason: None
        self.reason: str | None = None
        self.links = links or []
        self._size, self._closing = size, threading.Event()
        self._found = threading.Event()  # set when a loss was found
        self._started = threading.Event()
        self._news = threading.Condition()
        self._hellos: dict[int, Mapping[str, Any]] = {}
        self._heard: dict[int, float] = {}
        self._stopped: dict[int, float] = {}
        self._clock = OwnClock(TURN_S)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(links is None,), name="manylora-ranks", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def wait_hello(self, rank: int, deadline: float) -> Mapping[str, Any] | None:
        """A rank's description of itself. None if it is lost, or has not joined by `deadline`."""
        with self._news:
            while rank not in self._hellos and self.reason is None and time.monotonic() < deadline:
                self._news.wait(PERIOD_S)
            return self._hellos.get(rank)

    def wait_loss(self, seconds: float) -> str | None:
        """The reason of a loss found within this time."""
        self._found.wait(seconds)
        return self.reason

    def note(self, reason: str) -> None:
        """Record a loss detected elsewhere. Only the first counts. Thread-safe."""
        if self.reason is None and not self._closing.is_set():
            self.reason = reason
            self._found.set()

    def close(self) -> None:
        """End all ranks. Those that do not exit are killed. Idempotent."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * END_S)

    def _run(self, spawn: bool) -> None:
        try:
            if spawn:
                self.links = spawn_ranks(self._size)
        except BaseException as error:
            self._error = error
        self._started.set()
        while self._error is None and self.reason is None and not self._closing.wait(0):
            self._look()
        self._found.set()
        if self.reason is not None:
            logger.error("%s: this group of %d ranks ends", self.reason, self._size)
            self._end(0.0)
            self.lost(self.reason)
            self._closing.wait()
        self._end(END_S)

    def _look(self) -> None:
        """Receive reports, for at most PERIOD_S."""
        now, links = self._clock.read(), {link.steps.fileno(): link for link in self.links}
        readable, _, _ = select.select(list(links), [], [], PERIOD_S)
        for number in readable:
            link = links[number]
            try:
                message = link.steps.receive()
            except (ChannelClosedError, ValueError):
                if not self._closing.is_set():
                    self.note(self._ended(link))
                return
            self._heard[link.rank] = now
            if message.what == "failed":
                self.note(f"rank {link.rank} of {self._size}: {message.values['reason']}")
            elif message.what == "hello":
                with self._news:
                    self._hellos[link.rank] = message.values
                    self._news.notify_all()
        for link in self.links:
            self._check(link, now)

    def _check(self, link: Link, now: float) -> None:
        heard = self._heard.get(link.rank, now)  # a rank that is still loading does not report yet
        if link.process is not None and _is_stopped(link.process.pid):
            if now - self._stopped.setdefault(link.rank, now) > STOPPED_S:
                self.note(f"rank {link.rank} of {self._size} was stopped by a signal")
        else:
            self._stopped.pop(link.rank, None)
            if now - heard > SILENCE_S:
                self.note(f"rank {link.rank} of {self._size} has not answered for {SILENCE_S:.0f} s")

    def _ended(self, link: Link) -> str:
        how = "is gone"
        if link.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = link.process.wait(LAST_WORDS_S)
                how = f"ended with {f'signal {-code}' if code < 0 else f'status {code}'}"
        return f"rank {link.rank} of {self._size} {how}"

    def _end(self, patience: float) -> None:
        """Close all channels, which ends the ranks. Kill those on this machine that do not exit."""
        for link in self.links:
            link.close()
        deadline = time.monotonic() + patience
        for link in self.links:
            if link.process is None:
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                link.process.wait(max(0.0, deadline - time.monotonic()))
                continue
            link.process.send_signal(signal.SIGKILL)
            link.process.wait()


def _is_stopped(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rsplit(")", 1)[1].split()[0] == "T"
