"""Leader: rank 0 tells the others what it does; a thread detects those that ended or hang."""

from __future__ import annotations

import logging
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from manylora.config.engine import EngineConfig
from manylora.errors import ConfigError, GroupLostError, RequestError
from manylora.ranks import rendezvous
from manylora.ranks.channel import ChannelClosedError, Message
from manylora.ranks.rank_info import RankInfo
from manylora.system.lifeline import OwnClock

logger = logging.getLogger("manylora")

PERIOD_S = 0.1
HELLO_S = 0.005  # between looks for a rank's description
STOPPED_S = 3.0  # a process stopped by a signal for this long counts as lost
SILENCE_S = 30.0  # without reports, which come twice a second, a rank counts as lost
TURN_S = 1.0  # of `OwnClock`: the most that one check can add
LAST_WORDS_S = 1.0  # for a rank to exit after it closed its sockets
END_S = 5.0  # for ranks to exit by themselves


class Watch:
    """Also starts the ranks, as the system ends them with the thread that did, and this one lives as long as
    the process. links: to ranks started elsewhere. lost: called once, on this thread, with the reason.
    """

    def __init__(self, size: int, links: list[rendezvous.Link] | None = None) -> None:
        self.lost: Callable[[str], None] = lambda reason: None
        self.reason: str | None = None
        self._size, self._closing = size, threading.Event()
        self._found = threading.Event()  # set when a loss was found
        self._hellos: dict[int, Mapping[str, Any]] = {}
        self._heard: dict[int, float] = {}
        self._stopped: dict[int, float] = {}
        self._clock = OwnClock(TURN_S)
        found: Future[list[rendezvous.Link]] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(links, found), name="manylora-ranks", daemon=True
        )
        self._thread.start()
        self.links = found.result()

    def wait_hello(self, rank: int, deadline: float) -> Mapping[str, Any] | None:
        """A rank's description of itself. None if it is lost, or has not joined by `deadline`."""
        while rank not in self._hellos and self.reason is None and time.monotonic() < deadline:
            self._found.wait(HELLO_S)
        return self._hellos.get(rank)

    def wait_loss(self, seconds: float) -> str | None:
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

    def _run(self, links: list[rendezvous.Link] | None, found: Future[list[rendezvous.Link]]) -> None:
        try:
            self.links = rendezvous.spawn_ranks(self._size) if links is None else links
        except BaseException as error:
            found.set_exception(error)
            return
        found.set_result(self.links)
        while self.reason is None and not self._closing.is_set():
            self._look()
        self._found.set()
        if self.reason is not None:
            logger.error("%s: this group of %d ranks ends", self.reason, self._size)
            self._end(0.0)
            self.lost(self.reason)
            self._closing.wait()
        self._end(END_S)

    def _look(self) -> None:
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
                self._hellos[link.rank] = message.values
        for link in self.links:
            self._check(link, now)

    def _check(self, link: rendezvous.Link, now: float) -> None:
        text = ""
        if link.process is not None:
            with suppress(OSError):
                stat = Path(f"/proc/{link.process.pid}/stat")
                text = stat.read_text(encoding="utf-8", errors="replace")
        if text and text.rsplit(")", 1)[1].split()[0] == "T":
            if now - self._stopped.setdefault(link.rank, now) > STOPPED_S:
                self.note(f"rank {link.rank} of {self._size} was stopped by a signal")
        else:
            self._stopped.pop(link.rank, None)
            heard = self._heard.get(link.rank, now)  # a rank that is still loading does not report yet
            if now - heard > SILENCE_S:
                self.note(f"rank {link.rank} of {self._size} has not answered for {SILENCE_S:.0f} s")

    def _ended(self, link: rendezvous.Link) -> str:
        how = "is gone"
        if link.process is not None:
            with suppress(subprocess.TimeoutExpired):
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
            with suppress(subprocess.TimeoutExpired):
                link.process.wait(max(0.0, deadline - time.monotonic()))
                continue
            link.process.send_signal(signal.SIGKILL)
            link.process.wait()


FIND_S = 5.0  # to find out whether an error was caused by the loss of a rank


class Leader:
    """Raises ConfigError if a rank does not join, or has another checkpoint or configuration."""

    def __init__(self, config: EngineConfig, info: RankInfo) -> None:
        self.info, self._ended, self._told = info, False, 0
        self._lock = threading.Lock()  # protects the adapter channels
        store, token = rendezvous.open_store(info), secrets.token_hex(16) if info.address else ""
        self.store: Store = rendezvous.group_store(store, token)
        self._watch = Watch(info.size, rendezvous.meet_ranks(info, store, token) if info.address else None)
        try:
            self._greet(config, store.port)
        except BaseException as error:
            for link in self._watch.links if isinstance(error, ConfigError) else ():
                with suppress(ChannelClosedError):  # each host's user sees only its own rank's messages
                    link.steps.send(Message(rendezvous.REFUSED, {"reason": str(error)}))
            self.close()
            raise

    def on_loss(self, lost: Callable[[str], None]) -> None:
        """Call `lost` once, from any thread, with the reason when a rank is lost."""
        self._watch.lost = lost
        if self._watch.reason is not None:
            lost(self._watch.reason)

    def tell(self, message: Message) -> None:
        """Make the other ranks do the same, in the order of the calls. One thread. Raises GroupLostError."""
        self._told += 1
        for link in self._watch.links:
            try:
                link.steps.send(message)
            except ChannelClosedError as error:
                raise self.lost(error) from error

    def ask(self, message: Message) -> None:
        """Make the other ranks do something beside the steps, after everything they were told before, and
        wait until they have. Thread-safe. Raises RequestError if a rank could not do it, GroupLostError.
        """
        failed: str | None = None
        message = replace(message, values={**message.values, "after": self._told})
        with self._lock:
            try:
                for link in self._watch.links:
                    link.adapters.send(message)
                for link in self._watch.links:
                    failed = link.adapters.receive().values.get("error") or failed
            except ChannelClosedError as error:
                raise self.lost(error) from error
        if failed is not None:
            raise RequestError(f"The adapter could not be loaded: {failed}")

    def lost(self, error: BaseException) -> GroupLostError:
        """For an error in a joint operation: afterwards the ranks are no longer in step."""
        if isinstance(error, GroupLostError):
            return error
        reason = self._watch.wait_loss(FIND_S)
        if reason is None:
            logger.error("a step failed", exc_info=error)
            reason = f"a step failed on rank 0 of {self.info.size}: {type(error).__name__}"
            self._watch.note(reason)
        return GroupLostError(reason)

    def start_error(self, error: Exception) -> Exception:
        """The error to raise for an error while the group starts, which another rank may have caused."""
        reason = self._watch.wait_loss(0.0 if isinstance(error, ConfigError) else FIND_S)
        return error if reason is None else ConfigError(reason)

    def end(self, message: Message) -> bool:
        """Tell the other ranks to end, and wait for them. Returns False if that was done before."""
        if self._ended:
            return False
        with suppress(GroupLostError):
            if self._watch.reason is None:
                self.tell(message)
        self.close()
        return True

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._ended = True
        self._watch.close()

    def _greet(self, config: EngineConfig, port: int) -> None:
        """Check that all ranks have come, and are to serve the same. port: of the store."""
        info, expected = self.info, rendezvous.identity(config)
        deadline = time.monotonic() + rendezvous.START_S
        for link in self._watch.links:
            values: dict[str, Any] = {"rank": link.rank, "size": info.size, "port": port}
            if link.process is not None:  # others have their configuration
                values["config"] = rendezvous.to_values(config)
            self._tell_one(link, Message("start", values))
        for link in self._watch.links:
            found = self._watch.wait_hello(link.rank, deadline)
            if found is None:
                text = f"rank {link.rank} of {info.size} did not come within {rendezvous.START_S:.0f} s"
                raise ConfigError(self._watch.reason or text)
            rendezvous.check_identity(link.rank, found, expected)
        for link in self._watch.links:
            self._tell_one(link, Message(rendezvous.AGREED))

    def _tell_one(self, link: rendezvous.Link, message: Message) -> None:
        try:
            link.steps.send(message)
        except ChannelClosedError as error:
            raise ConfigError(self._watch.wait_loss(FIND_S) or f"rank {link.rank} is gone") from error
