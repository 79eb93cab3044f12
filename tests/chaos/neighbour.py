"""Clients that do nothing wrong while others do, and what they noticed of it."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service import ANSWERS, SILENCE_S


class Clients:
    """So many threads that stream one answer after another.

    outcomes: how many streams were whole; how many broke, with an error or a closed connection; and how many
    were silent for SILENCE_S. wrong: texts that are not their adapter's. worst_gap: between two pieces, s.
    """

    def __init__(self, count: int, stream: Callable[[str | None], Iterator[str]]) -> None:
        self.outcomes = {"whole": 0, "broken": 0, "silent": 0}
        self.worst_gap = 0.0
        self.wrong: list[str] = []
        self._right = {name: "".join(stream(name)) for name in ANSWERS}
        self._stream, self._done, self._lock = stream, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(2 * SILENCE_S)
            self.outcomes["silent"] += thread.is_alive()

    def _run(self, number: int) -> None:
        names = list(ANSWERS)
        while not self._done.is_set():
            number += 1
            name, text, gap, last = names[number % len(names)], "", 0.0, time.monotonic()
            try:
                for piece in self._stream(name):
                    now = time.monotonic()
                    gap, last, text = max(gap, now - last), now, text + piece
                outcome = "whole" if text == self._right[name] else "broken"
            except TimeoutError:
                outcome = "silent"
            except (OSError, ValueError, http.client.HTTPException):
                outcome = "broken"
            with self._lock:
                self.outcomes[outcome] += 1
                if outcome == "whole":
                    self.worst_gap = max(self.worst_gap, gap)
                if not self._right[name].startswith(text):
                    self.wrong.append(f"{name}: {text[:200]}")
            if outcome != "whole":
                self._done.wait(0.1)


@contextmanager
def clients(count: int, stream: Callable[[str | None], Iterator[str]]) -> Iterator[Clients]:
    made = Clients(count, stream)
    made.start()
    try:
        yield made
    finally:
        made.stop()
