"""Command lines that are forgiving in how flags are spelt, and say what to write instead of a wrong one.
Progress in a terminal or a log."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

logger = logging.getLogger("manylora")

UNKNOWN = "unrecognized arguments: "  # argparse's words


class Parser(argparse.ArgumentParser):
    """Flags may be spelt with dashes or underscores. An error is one line, with the flag that was meant.

    instead: flags and commands of other programs that are not accepted, without leading dashes and with
    underscores, and what to use here.
    """

    def __init__(self, *args: Any, instead: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._instead = instead or {}

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([self._own_spelling(one) for one in given], namespace)

    def error(self, message: str) -> NoReturn:
        if command := re.search(r"invalid choice: '([\w-]+)'", message):
            other = self._instead.get(command[1].replace("-", "_"))
            message += "" if other is None else f"; {other}"
        flag = next(iter(message.partition(UNKNOWN)[2].split()), "").partition("=")[0]
        other = self._instead.get(flag.lstrip("-").replace("-", "_")) if flag.startswith("-") else None
        if other is not None:
            message = f"{flag} is not taken here: {other}"
        elif near := difflib.get_close_matches(flag, self._flags(), n=1) if flag else []:
            message += f"; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: {message} (the options: {self.prog} --help)\n")

    def _own_spelling(self, given: str) -> str:
        name, equals, value = given.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return given
        plain = name.replace("_", "-")
        same = (flag for flag in self._option_string_actions if flag.replace("_", "-") == plain)
        return next(same, name) + equals + value

    def _flags(self) -> list[str]:
        """All flags, also those of commands within this one, whose unknown flags are reported here."""
        found = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    found += command._flags() if isinstance(command, Parser) else []
        return found


QUIET_S = 2.0  # before the first line: shorter operations only get a summary
LINE_S = 5.0  # between two lines


class Progress:
    """A context manager that logs a summary on success. Thread-safe. doing, done: "loading", "loaded"."""

    def __init__(self, doing: str, done: str, what: str, total: int) -> None:
        self._doing, self._done, self._what, self._total = doing, done, what, total
        self._lock = threading.RLock()
        self._now = 0
        self._started = time.monotonic()
        self._due = self._started + QUIET_S

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            seconds = time.monotonic() - self._started
            logger.info("%s %s: %s in %.1f s", self._done, self._what, size(self._total), seconds)

    def add(self, count: int) -> None:
        """This many more bytes are done."""
        with self._lock:
            self.set(self._now + count)

    def set(self, count: int) -> None:
        """This many bytes are done in total."""
        with self._lock:
            self._now, now = min(count, self._total), time.monotonic()
            if now < self._due:
                return
            seconds = now - self._started
            done, speed = 100 * self._now // max(1, self._total), size(int(self._now / seconds))
            amount = f"{size(self._now)} of {size(self._total)}"
            text = "%s %s: %d %%, %s, %.0f s, %s/s"
            logger.info(text, self._doing, self._what, done, amount, seconds, speed)
            self._due = now + LINE_S


def size(count: int) -> str:
    """Bytes in readable form: 1.2 GB is 1.2e9."""
    for unit, bytes_of in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= bytes_of:
            return f"{count / bytes_of:.1f} {unit}"
    return f"{count} bytes"
